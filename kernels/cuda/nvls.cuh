// NVLS: symmetric buffers behind a multicast address. The switch between the GPUs sums the copies of all ranks where
// one reads there, and writes to all of them where one writes. So each rank moves its part of the data once, whatever
// the number of ranks. A sum is made in float32, in the order of the switch, and rounded once; the emulated device has
// rank order.
#pragma once

#include "call.cuh"
#include "ops.cuh"

namespace ringcomm::cuda {

// The copies of all ranks from byte `begin` of an array on.
struct Multicast {
    Location location;
    uint64_t begin;
    int count;

    RC_DEVICE bool usable() const { return location.multicast && (location.offset + begin) % PACK == 0; }
    RC_DEVICE byte* all() const { return location.multicast + location.offset + begin; }
    RC_DEVICE byte* of(int rank) const { return location.at(rank) + begin; }
    RC_DEVICE void store(uint64_t at, const Pack& pack) const { multimem_store(*this, at, pack); }
};

template <class Math>
struct MulticastSum {
    Math math;
    Multicast copies;

    RC_DEVICE bool usable() const { return copies.usable(); }
    RC_DEVICE Pack load(uint64_t at) const { return multimem_sum(math, copies, at); }
};

// This rank's own array.
struct OwnPacks {
    byte* base;

    RC_DEVICE bool usable() const { return reinterpret_cast<uint64_t>(base) % PACK == 0; }
    RC_DEVICE Pack load(uint64_t at) const { return load16(base + at); }
    RC_DEVICE void store(uint64_t at, const Pack& pack) const { store16(base + at, pack); }
};

template <class From, class To>
RC_NOINLINE void move_packs(const Ctx ctx, const From from, const To to, uint64_t bytes) {
    constexpr int tile = 4;  // in flight
    const uint64_t stride = ctx.threads * PACK;
    RC_NO_UNROLL for (uint64_t at = ctx.thread * PACK; at < bytes; at += tile * stride) {
        Pack packs[tile];
        RC_UNROLL for (int t = 0; t < tile; ++t) {
            if (at + t * stride < bytes) packs[t] = from.load(at + t * stride);
        }
        RC_UNROLL for (int t = 0; t < tile; ++t) {
            if (at + t * stride < bytes) to.store(at + t * stride, packs[t]);
        }
    }
}

// Moves the whole packs, if there is a multicast address; returns their bytes. The rest takes the usual way.
template <class From, class To>
RC_DEVICE uint64_t move_by_nvls(const Ctx& ctx, const From& from, const To& to, uint64_t bytes) {
    if (!from.usable() || !to.usable()) return 0;
    const uint64_t whole = bytes / PACK * PACK;
    multimem_fence();
    move_packs(ctx, from, to, whole);
    multimem_fence();
    return whole;
}

}  // namespace ringcomm::cuda
