// The memory of point-to-point messages on a GPU: one allocation of each rank that its peers map. It is not the arena
// of the collectives, because messages run beside them on other streams, and not all ranks take part.
//
//   written by    what
//   owner         broken; ended; staged, and the slots
//   a reader      released, of the slot that it has read
//
// The owner stages each message, or a chunk of it, in a slot. Its host gives slots out. A channel is one part of a
// message, and has a flag of its own; flags lie 32 bytes apart. All memory starts as zeros, and nothing is ever reset.
#pragma once

#include "call.cuh"

namespace ringcomm::cuda {

// Chosen by the host, the same on all ranks. Sizes in bytes, multiples of 16.
struct MessageShape {
    int32_t ranks, channels;
    uint32_t piece_bytes;  // the part of a slot that one flag publishes
    uint32_t slots, slot_bytes;
};

struct MessageLayout {
    MessageShape shape;
    uint64_t staged_at, released_at, slots_at, bytes;
};

RC_HOST_DEVICE bool valid(const MessageShape& s) {
    return s.ranks > 0 && s.channels > 0 && s.piece_bytes && s.slots && s.slot_bytes &&
           (s.piece_bytes | s.slot_bytes) % PACK == 0;
}

RC_HOST_DEVICE MessageLayout layout_of(const MessageShape& s) {
    MessageLayout l{};
    l.shape = s;
    l.staged_at = 128 + MAX_LAUNCHES * sizeof(uint32_t);
    l.released_at = l.staged_at + uint64_t(s.slots) * s.channels * FLAG;
    l.slots_at = (l.released_at + uint64_t(s.slots) * FLAG + 127) / 128 * 128;
    l.bytes = l.slots_at + uint64_t(s.slots) * s.slot_bytes;
    return l;
}

// `arena`: that of any rank, as it is mapped here.
struct MessageArena {
    byte* base;
    MessageLayout layout;

    RC_HOST_DEVICE uint32_t* broken() const { return reinterpret_cast<uint32_t*>(base); }
    RC_HOST_DEVICE uint32_t* ended(int launch) const { return reinterpret_cast<uint32_t*>(base + 128) + launch; }
    // How much of the message in a slot is there, in channel c; beside it the message's fingerprint.
    RC_HOST_DEVICE uint64_t* staged(byte* arena, int c, int slot) const {
        return flag(arena + layout.staged_at, uint64_t(slot) * layout.shape.channels + c);
    }
    // The number of the last message that was read from a slot.
    RC_HOST_DEVICE uint64_t* released(byte* arena, int slot) const { return flag(arena + layout.released_at, slot); }
    RC_HOST_DEVICE byte* slot(byte* arena, int slot) const {
        return arena + layout.slots_at + uint64_t(slot) * layout.shape.slot_bytes;
    }

private:
    RC_HOST_DEVICE static uint64_t* flag(byte* at, uint64_t index) {
        return reinterpret_cast<uint64_t*>(at + index * FLAG);
    }
};

}  // namespace ringcomm::cuda
