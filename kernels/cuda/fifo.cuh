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

RC_DEVICE uint32_t slot_bytes_of(const Channel& channel, SlotUse use) {
    return use == ONE_PEER ? channel.layout.shape.slot_bytes : channel.layout.peer_slot_bytes;
}

// This rank's end of a FIFO. It keeps one address: registers are what a ring has least of.
struct Fifo {
    const Call& call;
    const SlotUse use;
    const int peer;
    const Channel remote;
    uint32_t step;

    RC_DEVICE Fifo(const Call& call, SlotUse use, int peer, uint32_t step)
        : call(call), use(use), peer(peer), remote(call.at(peer)), step(step) {}

    RC_DEVICE uint64_t base() const { return call.epoch * STEPS; }
    RC_DEVICE uint32_t slot_bytes() const { return slot_bytes_of(call.mine, use); }

    // The slot of this step, in the arena of `to`, of those that `from` fills.
    RC_DEVICE byte* slot(const Channel& to, int from) const {
        byte* const slots = use == ONE_PEER ? to.slots() : to.peer_slots(from);
        return slots + uint64_t(step % to.layout.shape.slots) * slot_bytes();
    }

    // `flag`: the one that the peer sets here.
    RC_DEVICE bool wait(const uint64_t* flag, Reason reason, uint64_t steps) const {
        return call.wait(flag, reason, peer, base() + steps, [&](uint64_t got) {
            const uint64_t counted = got - base();  // STEPS or more: from another call
            return counted >= steps && counted < STEPS;
        });
    }
};

struct RecvFifo : Fifo {
    RC_DEVICE RecvFifo(const Call& call, SlotUse use, int peer, uint32_t step = 0) : Fifo(call, use, peer, step) {}

    RC_DEVICE byte* slot() const { return Fifo::slot(call.mine, peer); }
    RC_DEVICE bool wait_data() const { return wait(call.mine.tail(peer), NO_DATA, step + 1); }
    RC_DEVICE void release() const { store_release<SITE_HEAD>(remote.head(call.me), base() + step + 1); }
};

struct SendFifo : Fifo {
    RC_DEVICE SendFifo(const Call& call, SlotUse use, int peer, uint32_t step = 0) : Fifo(call, use, peer, step) {}

    RC_DEVICE byte* slot() const { return Fifo::slot(remote, call.me); }
    RC_DEVICE bool wait_slot() const {
        const uint32_t slots = call.mine.layout.shape.slots;
        return step < slots || wait(call.mine.head(peer), NO_SLOT, step + 1 - slots);
    }
    RC_DEVICE void post() const { store_release<SITE_TAIL>(remote.tail(call.me), base() + step + 1); }
};

}  // namespace ringcomm::cuda
