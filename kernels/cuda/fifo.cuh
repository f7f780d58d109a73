// Slots between two ranks. What rank p pushes to rank q goes through slots in q's arena: p fills slot k, then sets
// `tail` at q to k + 1; q copies it out, then sets `head` at p to k + 1; p fills slot k + slots after that. The flags
// count from epoch * STEPS, so those of earlier calls mean nothing, and nothing is kept from call to call but the
// epoch.
#pragma once

#include "call.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

constexpr uint64_t STEPS = 1 << 24;  // of a FIFO in one call, at most

// The slots of a channel: all for one peer, or divided among all peers.
enum SlotUse { ONE_PEER, ALL_PEERS };

// This rank's end of a FIFO.
struct Fifo {
    const Call& call;
    const int peer;
    const uint64_t* theirs;  // the flag that the peer sets here
    uint64_t* ours;          // the flag that this rank sets there
    byte* const slots;
    const uint32_t slot_bytes;
    uint32_t step = 0;

    RC_DEVICE byte* slot() const { return slots + uint64_t(step % call.mine.layout.shape.slots) * slot_bytes; }
    RC_DEVICE uint64_t base() const { return call.epoch * STEPS; }

    RC_DEVICE bool wait(Reason reason, uint64_t steps) const {
        return call.wait(theirs, reason, peer, base() + steps, [&](uint64_t got) {
            const uint64_t counted = got - base();  // STEPS or more: from another call
            return counted >= steps && counted < STEPS;
        });
    }
};

RC_DEVICE uint32_t slot_bytes_of(const Channel& channel, SlotUse use) {
    return use == ONE_PEER ? channel.layout.shape.slot_bytes : channel.layout.peer_slot_bytes;
}

RC_DEVICE byte* slots_from(const Channel& channel, SlotUse use, int from) {
    return use == ONE_PEER ? channel.slots() : channel.peer_slots(from);
}

struct RecvFifo : Fifo {
    RC_DEVICE RecvFifo(const Call& call, SlotUse use, int peer)
        : Fifo{call,
               peer,
               call.mine.tail(peer),
               call.at(peer).head(call.me),
               slots_from(call.mine, use, peer),
               slot_bytes_of(call.mine, use)} {}

    RC_DEVICE bool wait_data() const { return wait(NO_DATA, step + 1); }
    RC_DEVICE void release() const { store_release<SITE_HEAD>(ours, base() + step + 1); }
};

struct SendFifo : Fifo {
    RC_DEVICE SendFifo(const Call& call, SlotUse use, int peer)
        : Fifo{call,
               peer,
               call.mine.head(peer),
               call.at(peer).tail(call.me),
               slots_from(call.at(peer), use, call.me),
               slot_bytes_of(call.mine, use)} {}

    RC_DEVICE bool wait_slot() const {
        const uint32_t slots = call.mine.layout.shape.slots;
        return step < slots || wait(NO_SLOT, step + 1 - slots);
    }
    RC_DEVICE void post() const { store_release<SITE_TAIL>(ours, base() + step + 1); }
};

}  // namespace ringcomm::cuda
