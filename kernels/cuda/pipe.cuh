// Pipes. What rank p pushes to rank q goes through slots in q's arena: p fills slot k, then sets `arrived` at q to k +
// 1; q takes it, then sets `taken` at p to k + 1; p fills slot k + slots after that. The flags count from number *
// STEPS, so those of earlier calls mean nothing, and nothing must be kept from call to call but the number.
#pragma once

#include "call.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

constexpr uint64_t STEPS = 1 << 24;  // of a pipe in one call, at most

// How the slots of a channel are used: as one pipe, from one peer; or divided among all peers.
enum Width { WHOLE, SHARED };

// This rank's end of a pipe from or to a peer. `number`: that of the call, which both ends agree on.
struct Pipe {
    const Call& call;
    const int peer;
    const uint64_t* here;  // the flag that the peer writes
    uint64_t* there;       // the one that this rank writes
    byte* const slots;
    const uint32_t slot_bytes;
    const uint64_t base;
    uint32_t step = 0;

    RC_DEVICE byte* slot() const { return slots + uint64_t(step % call.mine.layout.shape.slots) * slot_bytes; }

    RC_DEVICE bool reached(Reason reason, uint64_t steps) const {
        return call.wait(here, reason, peer, base + steps, [&](uint64_t got) {
            const uint64_t counted = got - base;  // STEPS or more: from another call
            return counted >= steps && counted < STEPS;
        });
    }
};

RC_DEVICE uint32_t slot_bytes(const Channel& channel, Width width) {
    return width == WHOLE ? channel.layout.shape.slot_bytes : channel.layout.pair_bytes;
}

RC_DEVICE byte* slots_from(const Channel& channel, Width width, int from) {
    return width == WHOLE ? channel.slots() : channel.pair_slots(from);
}

struct Inlet : Pipe {
    RC_DEVICE Inlet(const Call& call, Width width, int peer, uint64_t number, Traffic traffic = BETWEEN_ALL)
        : Pipe{call,
               peer,
               call.mine.arrived(traffic, peer),
               call.at(peer).taken(traffic, call.me),
               slots_from(call.mine, width, peer),
               ringcomm::cuda::slot_bytes(call.mine, width),
               number * STEPS} {}

    RC_DEVICE bool arrived() const { return reached(NO_DATA, step + 1); }
    RC_DEVICE void took() const { store_release<SITE_TAKEN>(there, base + step + 1); }
};

struct Outlet : Pipe {
    RC_DEVICE Outlet(const Call& call, Width width, int peer, uint64_t number, Traffic traffic = BETWEEN_ALL)
        : Pipe{call,
               peer,
               call.mine.taken(traffic, peer),
               call.at(peer).arrived(traffic, call.me),
               slots_from(call.at(peer), width, call.me),
               ringcomm::cuda::slot_bytes(call.mine, width),
               number * STEPS} {}

    RC_DEVICE bool room() const {
        const uint32_t slots = call.mine.layout.shape.slots;
        return step < slots || reached(NO_ROOM, step + 1 - slots);
    }
    RC_DEVICE void filled() const { store_release<SITE_ARRIVED>(there, base + step + 1); }
};

}  // namespace ringcomm::cuda
