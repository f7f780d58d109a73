// GpuGroup: one rank's end of a group of GPUs that access each other's memory. A call is one launch; by copy engines it
// is two, with copies between them.
//
// Its memory is allocated and opened in Python (ringcomm/transports/cuda/group.py), which also compiles the kernels and
// handles failures. From an array to its launch nothing runs there.
//
// Calls are numbered. The last block of a call writes its number to `Control::completed`, in host memory, so that the
// end of a call is known without an event.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "core/peer_group.h"
#include "cuda/liveness.h"
#include "cuda/plan.h"
#include "cuda/streams.h"

namespace ringcomm {

// Where the blocks of a call lie on all ranks, for copy engines (copies.cpp).
struct CopySource {
    const uint64_t* addresses;  // of the buffer, by rank; nullptr: kernels do the call
    uint64_t offset, stride;    // of what is read, in the buffer of rank p: offset + p * stride
    uint64_t digest;            // what all ranks must agree on
};

// A call as errors describe it.
struct LaunchInfo {
    uint64_t number;
    Signature signature;
    double timeout;
    cuda::RmsNorm norm{};
    bool by_copy_engines = false;
};

class GpuGroup {
public:
    GpuGroup(const Driver& driver, const rc_gpus_setup& setup, int rank);
    ~GpuGroup();
    GpuGroup(const GpuGroup&) = delete;

    const cuda::Shape& shape() const { return args_.arena.layout.shape; }
    LaunchPlan plan(const CallRecord& call, int size, int kernel = -1) const {
        return plan_launch(call, size, shape(), limits_, kernel);
    }
    CUstream own_stream() const { return streams_->own(); }

    // A kernel that Python has compiled and loaded.
    void load(int kernel, int dtype, int op, void* function);
    bool is_loaded(const LaunchPlan& plan) const { return function_of(plan); }
    void set_buffers(std::vector<rc_gpu_buffer> buffers);  // in which arrays are found; replaces the last ones
    // If not, RC_GPUS_FAST calls are RC_UNPREPARED, as they are while calls are traced: Python has a failure to raise.
    void allow_fast(bool allowed) { fast_allowed_.store(allowed); }

    // Launches a call, whose arguments have been checked, and returns its number. Throws RC_UNPREPARED if the kernel is
    // not loaded, or a failure has not been handled: then nothing was launched. `host` connects the same ranks.
    // `norm`: the RMSNorm after an all_reduce, in the same launch; empty: none.
    uint64_t call(PeerGroup& host, const CallRecord& call, CUstream stream, rc_gpus_mode mode,
                  const cuda::RmsNorm& norm = {});
    bool capturing(CUstream stream);
    // Lets later calls throw RC_CLOSED. Returns whether a graph has captured some.
    bool end_calls();
    // Lets later work on a stream wait for a call that was launched with RC_GPUS_ASYNC.
    void order(uint64_t number, CUstream stream);
    uint64_t launched() const { return launched_.load(); }
    LaunchInfo info(uint64_t number);  // number 0: not known any more

    // Whether a call has ended; also if its GPU has failed. A captured call runs when its graph is replayed.
    bool ended(uint64_t number) const {
        return number & CAPTURED || dead_.load() || load_acquire(&control_->completed) >= number;
    }
    // Returns once a call has ended. What ends the wait fails the group and aborts its kernels: when this returns or
    // throws, the memory of the call is not in use any more.
    void wait(PeerGroup& host, uint64_t number, double timeout);

    // --- The watching thread (waits.cpp).

    void begin_watching();  // on its thread
    // Checks the launches in flight once. It aborts them if the group has failed or a peer that they need is lost.
    // Returns whether Python has something to do: a kernel has failed, or a call of notify() has ended.
    bool poll_launches(PeerGroup& host);
    void sleep();                  // until the next poll is due
    void notify(uint64_t number);  // of a call in flight; the earliest counts
    void stop();                   // ends sleep(), now and later
    bool stopped() const { return stopped_.load(); }
    void resume() { reported_.store(false); }  // the failure of a kernel has been handled: the next one is news

private:
    class WaitForEnd;

    CUfunction function_of(const LaunchPlan& plan) const {
        return static_cast<CUfunction>(functions_[plan.kernel][plan.dtype][plan.op].load(std::memory_order_acquire));
    }
    uint64_t launch(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, CUstream stream, bool async);
    uint64_t capture_launch(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, CUstream stream,
                            uint64_t capture, bool async);
    CopySource copy_source(const PeerGroup& host, const CallRecord& call, const LaunchPlan& plan) const;
    uint64_t copy(PeerGroup& host, const CallRecord& call, const CopySource& source, CUstream stream, bool async);
    void copy_blocks(int rank, int size, const CallRecord& call, const CopySource& source, CUstream stream);
    void launch_barrier(PeerGroup& host, double timeout, uint64_t agreed, uint64_t number, CUstream stream);
    void await_last(PeerGroup& host, CUstream stream);
    [[noreturn]] void launch_failed(PeerGroup& host, const CallRecord& call, const Failure& failure);
    void start(const LaunchPlan& plan, CUstream stream);
    void fill(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, uint64_t number);
    uint64_t* tables_of(int size, const CallRecord& call, uint64_t number);
    const rc_gpu_buffer* buffer_of(const std::byte* array, uint64_t bytes) const;  // or nullptr
    cuda::Location locate(const std::byte* array, uint64_t bytes) const;
    void remember(LaunchInfo& slot, const LaunchInfo& info);
    void await_room(PeerGroup& host);              // for two more launches
    void await(PeerGroup& host, uint64_t number);  // as long as it takes
    void wake();                                   // the watching thread
    void abort() { __atomic_store_n(&control_->abort, uint64_t{1}, __ATOMIC_RELEASE); }
    bool failed() const { return load_acquire(&control_->failed); }
    bool busy() const;
    // liveness.cpp
    void check_gpu(PeerGroup& host);
    void end_hopeless_launches(PeerGroup& host);
    // The failure if a peer has been lost for so long that it cannot have done its part.
    std::optional<Failure> find_lost_peer(PeerGroup& host, PeerLoss& loss);

    static uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

    const Driver& driver_;
    const CUcontext context_;
    const std::string device_;  // its name in errors
    const int threads_;
    const rc_cuda_limits limits_;
    cuda::Control* const control_;
    uint64_t* const tables_;

    std::mutex launching_;  // guards these
    cuda::Args args_{};
    std::optional<GpuStreams> streams_;
    uint64_t captures_ = 0;
    std::vector<rc_gpu_buffer> buffers_;
    std::vector<std::vector<uint64_t>> addresses_;  // those of the buffers, to which these point

    std::mutex remembering_;  // guards these; never held across a wait
    LaunchInfo infos_[4 * MAX_LAUNCHES]{}, captured_infos_[MAX_LAUNCHES]{};

    std::atomic<void*> functions_[cuda::KERNELS][RC_DTYPES][RC_OPS]{};
    std::atomic<uint64_t> launched_{0};
    std::atomic<bool> fast_allowed_{true}, closed_{false}, dead_{false},
        replays_{false};  // dead: nothing runs on the GPU any more

    std::mutex watching_;
    std::condition_variable changed_;
    std::atomic<bool> asleep_{false}, stopped_{false}, reported_{false};
    std::atomic<uint64_t> notify_{0};  // 0: none
    uint64_t pause_ns_ = 0;            // of the last sleep(), while somebody waits for an end
    uint64_t idle_ns_ = 0;             // since when there is no launch
    PeerLoss loss_;
};

}  // namespace ringcomm
