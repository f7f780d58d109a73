// From a call to its launch.
#include "cuda/group.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ringcomm {

GpuGroup::GpuGroup(const Driver& driver, const rc_gpus_setup& setup, int rank)
    : driver_(driver),
      context_(static_cast<CUcontext>(setup.context)),
      device_(setup.device),
      threads_(setup.threads),
      limits_(setup.limits),
      control_(static_cast<cuda::Control*>(setup.control)),
      tables_(setup.tables) {
    args_.arena = {static_cast<cuda::byte*>(setup.arena), cuda::layout_of(cuda::bits_as<cuda::Shape>(setup.shape))};
    args_.control = control_;
    args_.rank = rank;
    const CurrentContext current(driver_, context_);
    streams_.emplace(driver_);
}

GpuGroup::~GpuGroup() {
    try {
        const CurrentContext current(driver_, context_);
        streams_.reset();
    } catch (const Failure&) {  // the context is gone, and its streams with it
    }
}

void GpuGroup::load(int kernel, int dtype, int op, void* function) {
    functions_[kernel][dtype][op].store(function, std::memory_order_release);
}

void GpuGroup::set_buffers(std::vector<rc_gpu_buffer> buffers) {
    std::vector<std::vector<uint64_t>> addresses;
    for (rc_gpu_buffer& buffer : buffers) {
        if (!buffer.addresses) continue;
        addresses.emplace_back(buffer.addresses, buffer.addresses + shape().ranks);
        buffer.addresses = addresses.back().data();
    }
    const std::lock_guard lock(launching_);
    addresses_ = std::move(addresses);
    buffers_ = std::move(buffers);
}

uint64_t GpuGroup::call(PeerGroup& host, const CallRecord& call, CUstream stream, rc_gpus_mode mode,
                        const cuda::RmsNorm& norm) {
    LaunchPlan plan = this->plan(call, host.size, norm.output ? int{cuda::ONE_SHOT} : -1);
    if (norm.output)  // a block has whole rows
        plan.blocks = int(std::clamp<uint64_t>(call.count / norm.width, 1, shape().channels));
    if (!is_loaded(plan)) throw Failure(RC_UNPREPARED, "the kernel of this call is not loaded");
    if (failed()) throw Failure(RC_UNPREPARED, "the failure of a kernel has not been handled");
    if (mode == RC_GPUS_FAST && (!fast_allowed_.load(std::memory_order_relaxed) || host.trace())) {
        throw Failure(RC_UNPREPARED, "a failure has not been raised, or calls are traced");
    }
    const std::lock_guard lock(launching_);
    if (closed_.load()) throw Failure(RC_CLOSED, "this communicator is closed", host.rank);
    const CurrentContext current(driver_, context_);
    args_.norm = norm;
    const uint64_t capture = streams_->capture_of(stream);
    if (!capture) {
        await_room(host);
        if (failed()) throw Failure(RC_UNPREPARED, "a kernel has failed meanwhile");
        const CopySource source = copy_source(host, call, plan);
        if (source.addresses) return copy(host, call, source, stream, mode == RC_GPUS_ASYNC);
        return launch(host, call, plan, stream, mode == RC_GPUS_ASYNC);
    }
    if (mode == RC_GPUS_FAST) throw Failure(RC_UNPREPARED, "the call is captured");  // who calls keeps the stream alive
    return capture_launch(host, call, plan, stream, capture, mode == RC_GPUS_ASYNC);
}

uint64_t GpuGroup::launch(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, CUstream stream,
                          bool async) {
    await_last(host, stream);
    const uint64_t last = launched_.load(), number = last + 1;
    fill(host, call, plan, number);
    remember(infos_[number % std::size(infos_)], {number, signature_of(call, host.size), call.timeout, args_.norm});
    try {
        const CUstream on = streams_->begin(stream, async, ended(last));
        start(plan, on);
        launched_.store(number);
        streams_->end(number, on);
    } catch (const Failure& failure) {
        launch_failed(host, call, failure);
    }
    if (asleep_.load()) wake();
    return number;
}

// Nothing on another stream can wait for a launch whose stream is captured now.
void GpuGroup::await_last(PeerGroup& host, CUstream stream) {
    const uint64_t last = launched_.load();
    if (!ended(last) && streams_->last_stream_is_captured(stream)) await(host, last);
}

void GpuGroup::launch_failed(PeerGroup& host, const CallRecord& call, const Failure& failure) {
    abort();
    const std::string what = describe(signature_of(call, host.size));
    host.fail(Failure(RC_SYSTEM, what + " could not be launched on " + device_ + ": " + failure.what(), host.rank));
}

// The kernel runs when the graph is replayed. What fails here is the program's capture, not the group.
uint64_t GpuGroup::capture_launch(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, CUstream stream,
                                  uint64_t capture, bool async) {
    const std::string what = describe(signature_of(call, host.size));
    if (plan.with_tables) reject("counts: expected equal blocks while a CUDA graph is captured, got " + what);
    const uint64_t number = CAPTURED | ++captures_;
    fill(host, call, plan, number);
    remember(captured_infos_[number % std::size(captured_infos_)],
             {number, signature_of(call, host.size), call.timeout, args_.norm});
    start(plan, streams_->begin_captured(stream, capture));
    streams_->end_captured(number, stream, async);
    replays_.store(true);
    wake();
    return number;
}

void GpuGroup::start(const LaunchPlan& plan, CUstream stream) {
    void* arguments[] = {&args_};
    driver_.check(
        driver_.cuLaunchKernel(function_of(plan), plan.blocks, 1, 1, threads_, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
}

void GpuGroup::fill(PeerGroup& host, const CallRecord& call, const LaunchPlan& plan, uint64_t number) {
    const CallBytes bytes = bytes_of(call, host.rank, host.size);
    args_.input = reinterpret_cast<const cuda::byte*>(call.source);
    args_.output = reinterpret_cast<cuda::byte*>(call.target);
    args_.input_location = locate(call.source, bytes.source);
    args_.output_location = locate(call.target, bytes.target);
    args_.send_offsets = plan.with_tables ? tables_of(host.size, call, number) : nullptr;
    args_.recv_offsets = plan.with_tables ? args_.send_offsets + host.size + 1 : nullptr;
    args_.call = number;
    args_.timeout_ns = uint64_t(std::clamp(call.timeout, 0.0, 1e9) * 1e9);
    args_.kernel = plan.kernel;
    args_.dtype = call.dtype;
    args_.op = plan.op;
    args_.root = call.root;
    args_.count = plan.count;
    args_.factor = call.factor;
}

// The offsets of the blocks to send, then of those to receive. The last call that used this memory has ended, because
// at most MAX_LAUNCHES are in flight.
uint64_t* GpuGroup::tables_of(int size, const CallRecord& call, uint64_t number) {
    const uint64_t length = size + 1;
    uint64_t* const tables = tables_ + number % MAX_LAUNCHES * 2 * length;
    const uint64_t* const received = collectives[call.collective].exchanges() ? call.counts + size : call.counts;
    tables[0] = tables[length] = 0;
    std::partial_sum(call.counts, call.counts + size, tables + 1);
    std::partial_sum(received, received + size, tables + length + 1);
    return tables;
}

const rc_gpu_buffer* GpuGroup::buffer_of(const std::byte* array, uint64_t bytes) const {
    const auto address = reinterpret_cast<uint64_t>(array);
    for (const rc_gpu_buffer& buffer : buffers_)
        if (address >= buffer.begin && address + bytes <= buffer.begin + buffer.bytes) return &buffer;
    return nullptr;
}

// The place of an array in a symmetric buffer, if it lies in one.
cuda::Location GpuGroup::locate(const std::byte* array, uint64_t bytes) const {
    const rc_gpu_buffer* const buffer = buffer_of(array, bytes);
    if (!buffer) return {};
    return {reinterpret_cast<cuda::byte* const*>(buffer->bases), buffer->number,
            reinterpret_cast<uint64_t>(array) - buffer->begin, reinterpret_cast<cuda::byte*>(buffer->multicast)};
}

bool GpuGroup::end_calls() {
    closed_.store(true);
    const std::lock_guard lock(launching_);  // a call that has begun is launched, or refused
    return replays_.load();
}

bool GpuGroup::capturing(CUstream stream) {
    const CurrentContext current(driver_, context_);
    return streams_->capture_of(stream);
}

void GpuGroup::order(uint64_t number, CUstream stream) {
    const std::lock_guard lock(launching_);
    if (!(number & CAPTURED) && ended(number)) return;
    const CurrentContext current(driver_, context_);
    streams_->wait_for(number, stream);
}

void GpuGroup::remember(LaunchInfo& slot, const LaunchInfo& info) {
    const std::lock_guard lock(remembering_);
    slot = info;
}

LaunchInfo GpuGroup::info(uint64_t number) {
    const std::lock_guard lock(remembering_);
    const LaunchInfo& found =
        number & CAPTURED ? captured_infos_[number % std::size(captured_infos_)] : infos_[number % std::size(infos_)];
    return found.number == number ? found : LaunchInfo{};
}

}  // namespace ringcomm
