// GpuMessages: the GPU of one rank, for messages: its arena (kernels/cuda/message_arena.cuh), its launches, and memory
// on the way to and from the host. It knows no peers but their arenas; p2p/gpu.h says what is launched when.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/errors.h"
#include "cuda/driver.h"
#include "kernels/cuda/messages.cuh"
#include "ringcomm.h"

namespace ringcomm {

// A message, or a chunk of it, in a slot of its sender: as the `location` of a packet.
struct GpuLocation {
    static constexpr uint64_t ON_GPU = uint64_t{1} << 62;  // no address has this bit
    int slot = -1;                                         // -1: not staged yet
    uint64_t number = 0;

    uint64_t packed() const { return ON_GPU | uint64_t(slot + 1) << 40 | number; }
    static GpuLocation of(uint64_t packed) {
        return {int(packed >> 40 & 0xffff) - 1, packed & ((uint64_t{1} << 40) - 1)};
    }
};

using GpuEvent = std::shared_ptr<CUevent_st>;  // back to its pool at the end
using GpuBuffer = std::shared_ptr<std::byte>;  // the same

// What a rank tells its peers of its arena.
struct ArenaHandle {
    CUipcMemHandle memory;
    uint64_t process, address;
    int32_t ordinal;
};

class GpuMessages {
public:
    GpuMessages(const Driver& driver, const rc_gpu_messages_setup& setup, int rank);
    ~GpuMessages();

    const std::string device;  // its name in errors
    size_t slot_bytes() const { return args_.arena.layout.shape.slot_bytes; }
    CurrentContext current() const { return {driver_, context_}; }
    bool capturing(CUstream stream) const;

    // --- Blocks.

    size_t free_slots() const { return free_.size(); }
    // Whether a message may be staged before a receive has matched it. A quarter of the slots is for chunks: those
    // are read as soon as they are there, however many messages before them wait for their receives.
    bool may_stage_early() const { return free_.size() > for_chunks(); }
    // The same, without a wait for a receiver: the last message of the slot has been read.
    bool may_stage_at_once();
    // The STAGE of a message in a slot that is free; `at_once`: in one that has been read, if there is one.
    cuda::MessageTransfer stage(const std::byte* data, uint64_t bytes, int peer, bool at_once);
    cuda::MessageTransfer fetch(std::byte* data, uint64_t bytes, int peer, GpuLocation at) const;
    const std::byte* slot(int index) const {
        return reinterpret_cast<const std::byte*>(args_.arena.slot(args_.arena.base, index));
    }
    // The FETCH of the message has been launched by its reader.
    void release(GpuLocation at, int reader) { free_.push_back({at.slot, at.number, reader}); }
    // No reader fetches it. `launch`: of its STAGE.
    void drop(int slot, uint64_t launch) { dropped_.push_back({slot, launch}); }
    void free_dropped();  // whose STAGE has ended
    // Whether all slots are free, and their readers have read them: then nobody needs the arena any more.
    bool all_read();

    // --- Arenas of peers.

    const ArenaHandle& handle() const { return handle_; }
    // Returns whether the arena of a peer can be accessed.
    bool open(int peer, const ArenaHandle& from);

    // --- Launches.

    bool has_room();  // for one more launch
    uint64_t launch(std::span<const cuda::MessageTransfer> transfers, CUstream stream, double timeout);
    bool ended(uint64_t launch) const {
        return __atomic_load_n(&completed_[launch % cuda::MAX_LAUNCHES], __ATOMIC_ACQUIRE) >= launch;
    }
    bool failed() const { return __atomic_load_n(&control_->failed, __ATOMIC_ACQUIRE); }
    bool aborted() const { return __atomic_load_n(&control_->abort, __ATOMIC_ACQUIRE); }
    const cuda::KernelFailure& failure() const { return control_->failure; }
    void abort() { __atomic_store_n(&control_->abort, uint64_t{1}, __ATOMIC_RELEASE); }
    std::string broken_context() const;  // what has failed; empty: nothing

    // --- Streams, events and copies.

    // One for each peer, so that no message waits for one of another peer; and one for batches of receives.
    static constexpr int BATCHES = -1;
    CUstream send_stream(int peer) { return made(send_[peer]); }
    CUstream receive_stream(int peer) { return made(receive_[peer]); }
    GpuEvent record(CUstream stream);
    void wait(CUstream stream, const GpuEvent& event) const;
    bool reached(const GpuEvent& event) const;
    void copy(void* target, const void* source, size_t bytes, CUstream stream) const;
    GpuBuffer memory(size_t bytes);  // of the device

    // --- Between the GPU and the host: in chunks of pinned memory, by copies that wait for nothing in their streams.
    // So each ends soon, and the memory of all messages together is bounded.

    enum Way { TO_HOST, TO_GPU };
    static size_t chunk_bytes(Way way);
    GpuBuffer chunk(Way way);  // null: all are in use
    CUstream copies(Way way) const { return copies_[way]; }
    void finish_copies();

private:
    struct Pool;
    struct Slot {
        int index;
        uint64_t last;  // the message in it that its next STAGE waits for; 0: it has been read
        int reader;
    };
    struct Dropped {
        int slot;
        uint64_t launch;
    };

    CUstream made(CUstream& stream) const;  // of high priority, at its first use
    size_t for_chunks() const { return args_.arena.layout.shape.slots / 4; }
    void note_read();

    const Driver& driver_;
    const CUcontext context_;
    const CUfunction function_;
    const int threads_;
    cuda::Control* const control_;
    uint64_t* const completed_;
    cuda::MessageArgs args_{};
    ArenaHandle handle_{};
    std::deque<Slot> free_;  // that was free for the longest time first
    std::vector<Dropped> dropped_;
    uint64_t numbers_ = 0, launches_ = 0;
    std::map<int, std::byte*> opened_;  // by peer; null: cannot be
    std::vector<CUdeviceptr> mapped_;
    CUstream copies_[2] = {};  // by way
    std::map<int, CUstream> send_, receive_;
    void* released_ = nullptr;  // pinned memory for the flags of all slots
    std::shared_ptr<Pool> pool_;
};

}  // namespace ringcomm
