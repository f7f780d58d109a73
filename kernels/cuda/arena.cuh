// The arena: all memory of one rank that its peers access, in one allocation. A channel is a block of the grid on every
// rank. It has its own flags, staging buffers and slots, so the blocks of one rank never wait for each other.
//
//   written by    what
//   host          peers: the address at which each rank's arena is mapped here; everything else starts as zeros
//   owner         broken, ended; per channel: epoch
//   peer p        per channel, at index p: start, tail, head, stage, lines, slots
//
// Flags lie 32 bytes apart, a sector of the GPU's cache. Nothing is ever reset except the lines (call.cuh).
#pragma once

#include "port.cuh"

namespace ringcomm::cuda {

// Chosen by the host, the same on all ranks. Sizes in bytes, multiples of 16.
struct Shape {
    int32_t ranks, channels;
    uint32_t slots;        // at least 3, or the ring deadlocks (ring.cuh)
    uint32_t slot_bytes;   // at least 16 for each rank
    uint32_t stage_bytes;  // what one rank stages for another at once
    uint32_t line_bytes;   // LL: the same, counting data only
};

constexpr uint64_t FLAG = 32;  // a start flag has a second word beside it

// Offsets in an arena and in each of its channels. The host computes them: a kernel finds them among its constants.
struct ArenaLayout {
    Shape shape;
    uint32_t peer_slot_bytes;  // of a slot when all peers share them
    uint64_t channels_at, channel_bytes, bytes;
    uint64_t flags_at, stage_at, lines_at, slots_at;
};

RC_HOST_DEVICE bool valid(const Shape& s) {
    const uint32_t sizes = s.slot_bytes | s.stage_bytes | s.line_bytes;
    return s.ranks > 0 && s.channels > 0 && s.slots >= 3 && s.slot_bytes >= PACK * s.ranks && s.stage_bytes &&
           s.line_bytes && sizes % PACK == 0;
}

RC_HOST_DEVICE ArenaLayout layout_of(const Shape& s) {
    const auto aligned = [](uint64_t bytes) { return (bytes + 127) / 128 * 128; };  // to cache lines
    const uint64_t n = s.ranks;
    ArenaLayout l{};
    l.shape = s;
    l.peer_slot_bytes = static_cast<uint32_t>(s.slot_bytes / n / PACK * PACK);
    l.channels_at = aligned(128 + n * sizeof(byte*));
    l.flags_at = 128;                                 // behind the epoch
    l.stage_at = aligned(l.flags_at + 4 * n * FLAG);  // start of two parities, tail, head
    l.lines_at = l.stage_at + 2 * n * s.stage_bytes;
    l.slots_at = l.lines_at + 2 * n * 2 * s.line_bytes;  // a flag word beside each data word
    l.channel_bytes = aligned(l.slots_at + uint64_t(s.slots) * s.slot_bytes);
    l.bytes = l.channels_at + s.channels * l.channel_bytes;
    return l;
}

// One channel in the arena of one rank.
struct Channel {
    byte* base;
    const ArenaLayout& layout;

    RC_HOST_DEVICE uint64_t* epoch() const { return reinterpret_cast<uint64_t*>(base); }
    RC_HOST_DEVICE uint64_t* start(uint64_t epoch, int from) const { return flag(epoch % 2, from); }
    RC_HOST_DEVICE uint64_t* tail(int from) const { return flag(2, from); }  // slots filled by that peer
    RC_HOST_DEVICE uint64_t* head(int by) const { return flag(3, by); }      // slots released by that peer
    RC_HOST_DEVICE byte* stage(uint64_t epoch, int from) const {
        return base + layout.stage_at + index(epoch, from) * layout.shape.stage_bytes;
    }
    RC_HOST_DEVICE uint64_t* lines(uint64_t epoch, int from) const {
        return reinterpret_cast<uint64_t*>(base + layout.lines_at + index(epoch, from) * 2 * layout.shape.line_bytes);
    }
    RC_HOST_DEVICE byte* slots() const { return base + layout.slots_at; }
    RC_HOST_DEVICE byte* peer_slots(int from) const {
        return slots() + uint64_t(from) * layout.shape.slots * layout.peer_slot_bytes;
    }

private:
    RC_HOST_DEVICE uint64_t index(uint64_t epoch, int from) const { return epoch % 2 * layout.shape.ranks + from; }
    RC_HOST_DEVICE uint64_t* flag(uint64_t row, int rank) const {
        return reinterpret_cast<uint64_t*>(base + layout.flags_at + (row * layout.shape.ranks + rank) * FLAG);
    }
};

struct DeviceArena {
    byte* base;
    ArenaLayout layout;

    RC_HOST_DEVICE uint32_t* broken() const { return reinterpret_cast<uint32_t*>(base); }
    RC_HOST_DEVICE uint32_t* ended() const { return reinterpret_cast<uint32_t*>(base + FLAG); }  // blocks, in this call
    RC_HOST_DEVICE byte** peers() const { return reinterpret_cast<byte**>(base + 128); }
    // A channel refers to the layout in here, so none can be made from a temporary.
    RC_HOST_DEVICE Channel channel(int c) const& { return at(base, c); }
    Channel channel(int c) const&& = delete;
    // Channel c of another rank, whose arena is mapped at `arena`.
    RC_HOST_DEVICE Channel at(byte* arena, int c) const& {
        return {arena + layout.channels_at + c * layout.channel_bytes, layout};
    }
    Channel at(byte* arena, int c) const&& = delete;
};

}  // namespace ringcomm::cuda
