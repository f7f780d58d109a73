// One pass of a block over memory: copy, or reduce and copy. All packs of a tile are read before any is written, so a
// result may overwrite an operand.
#pragma once

#include "ops.cuh"

namespace ringcomm::cuda {

// An unaligned pack is accessed in the widest parts that the address allows, part of a pack in bytes.
template <class Part>
RC_DEVICE Pack load_parts(const byte* at, uint64_t bytes) {
    Pack pack{};
    byte* to = reinterpret_cast<byte*>(&pack);
    RC_UNROLL for (uint64_t i = 0; i < PACK; i += sizeof(Part)) {
        if (i < bytes) memcpy(to + i, __builtin_assume_aligned(at + i, sizeof(Part)), sizeof(Part));
    }
    return pack;
}

template <class Part>
RC_DEVICE void store_parts(byte* at, const Pack& pack, uint64_t bytes) {
    const byte* from = reinterpret_cast<const byte*>(&pack);
    RC_UNROLL for (uint64_t i = 0; i < PACK; i += sizeof(Part)) {
        if (i < bytes) memcpy(__builtin_assume_aligned(at + i, sizeof(Part)), from + i, sizeof(Part));
    }
}

// A pack at any address, or the first bytes of one.
struct Unaligned {
    uint64_t bytes;

    RC_DEVICE uint64_t alignment(const byte* at) const { return bytes < PACK ? 1 : reinterpret_cast<uint64_t>(at); }
    RC_DEVICE Pack load(const byte* at) const {
        const uint64_t aligned = alignment(at);
        if (aligned % 16 == 0) return load16(at);
        if (aligned % 4 == 0) return load_parts<uint32_t>(at, PACK);
        if (aligned % 2 == 0) return load_parts<uint16_t>(at, PACK);
        return load_parts<uint8_t>(at, bytes);
    }
    RC_DEVICE void store(byte* at, const Pack& pack) const {
        const uint64_t aligned = alignment(at);
        if (aligned % 16 == 0) return store16(at, pack);
        if (aligned % 4 == 0) return store_parts<uint32_t>(at, pack, PACK);
        if (aligned % 2 == 0) return store_parts<uint16_t>(at, pack, PACK);
        store_parts<uint8_t>(at, pack, bytes);
    }
};

// A pack at a multiple of 16, and of 4.
struct Aligned16 {
    RC_DEVICE Pack load(const byte* at) const { return load16(at); }
    RC_DEVICE void store(byte* at, const Pack& pack) const { store16(at, pack); }
};
struct Aligned4 {
    RC_DEVICE Pack load(const byte* at) const { return load_parts<uint32_t>(at, PACK); }
    RC_DEVICE void store(byte* at, const Pack& pack) const { store_parts<uint32_t>(at, pack, PACK); }
};

// The operands of a reduction in rank order: this rank's own input, the others `stride` bytes apart.
struct Operands {
    const byte* own;
    int own_index;
    const byte* others;  // indexed by rank, own slot included
    uint64_t stride;
    int count;
    bool inputs;  // the others are inputs as well, not partial sums

    RC_DEVICE const byte* at(int i) const { return i == own_index ? own : others + i * stride; }
    RC_DEVICE bool is_input(int i) const { return inputs || i == own_index; }
    RC_DEVICE uint64_t alignment() const {
        return reinterpret_cast<uint64_t>(own) | reinterpret_cast<uint64_t>(others) | stride;
    }
};

// The destinations of the result; each may be null.
struct Results {
    byte* output;
    byte* slot;     // of the next rank
    bool complete;  // the whole result, not a partial sum

    template <class Store>
    RC_DEVICE void each(Store store) const {
        if (output) store(output);
        if (slot) store(slot);
    }
    RC_DEVICE uint64_t alignment() const {
        return reinterpret_cast<uint64_t>(output) | reinterpret_cast<uint64_t>(slot);
    }
};

// The arithmetic of a copy.
struct Copy {
    using Wide = Pack;
    static constexpr int tile = 4;
    RC_DEVICE Pack input(const Pack& pack) const { return pack; }
    RC_DEVICE Pack partial(const Pack& pack) const { return pack; }
    RC_DEVICE void combine(Pack&, const Pack&) const {}
    RC_DEVICE Pack narrow(const Pack& pack) const { return pack; }
    RC_DEVICE Pack output(const Pack& pack) const { return pack; }
};

// `tile` packs, one warp apart: a constant distance needs no register for each of them. All loads are issued before
// the first value is used.
template <int tile, class Math, class From, class To, class Access>
RC_DEVICE void reduce_tile(const Math& math, const From& from, const To& to, uint64_t begin, const Access& access) {
    constexpr uint64_t stride = WARP * PACK;
    Pack packs[tile];
    const auto load = [&](int i) {
        const byte* at = from.at(i) + begin;
        RC_UNROLL for (int t = 0; t < tile; ++t) packs[t] = access.load(at + t * stride);
    };
    const auto store = [&](byte* at) {
        at += begin;
        RC_UNROLL for (int t = 0; t < tile; ++t) access.store(at + t * stride, packs[t]);
    };
    const auto widened = [&](int i, int t) { return from.is_input(i) ? math.input(packs[t]) : math.partial(packs[t]); };
    typename Math::Wide acc[tile];
    load(0);
    RC_UNROLL for (int t = 0; t < tile; ++t) acc[t] = widened(0, t);
    RC_NO_UNROLL for (int i = 1; i < from.count; ++i) {
        load(i);
        RC_UNROLL for (int t = 0; t < tile; ++t) math.combine(acc[t], widened(i, t));
    }
    RC_UNROLL for (int t = 0; t < tile; ++t) packs[t] = to.complete ? math.output(acc[t]) : math.narrow(acc[t]);
    to.each(store);
}

// Reduces the whole tiles of the block; returns their bytes.
template <int tile, class Math, class From, class To, class Access>
RC_DEVICE uint64_t reduce_tiles(const Ctx& ctx, const Math& math, const From& from, const To& to, uint64_t bytes,
                                const Access& access) {
    const uint64_t tiles = tile * ctx.threads * PACK;  // of all threads of the block
    const uint64_t first = ctx.thread / WARP * (WARP * tile) + ctx.thread % WARP;
    uint64_t done = 0;
    RC_NO_UNROLL for (; done + tiles <= bytes; done += tiles)
        reduce_tile<tile>(math, from, to, done + first * PACK, access);
    return done;
}

// By value: the compiler would reload an argument behind a reference after each store.
template <class Math, class From, class To>
RC_NOINLINE void reduce(const Ctx ctx, const Math math, const From from, const To to, uint64_t bytes) {
    const uint64_t alignment = from.alignment() | to.alignment();
    uint64_t done = 0;
    if (alignment % PACK == 0)  // the usual case
        done = reduce_tiles<Math::tile>(ctx, math, from, to, bytes, Aligned16());
    else if (alignment % 4 == 0)
        done = reduce_tiles<2>(ctx, math, from, to, bytes, Aligned4());
    RC_NO_UNROLL for (uint64_t at = done + ctx.thread * PACK; at < bytes; at += ctx.threads * PACK)
        reduce_tile<1>(math, from, to, at, Unaligned{minimum(PACK, bytes - at)});
}

RC_DEVICE void copy(const Ctx& ctx, byte* to, const byte* from, uint64_t bytes) {
    if (to != from) reduce(ctx, Copy(), Operands{from, 0, nullptr, 0, 1, true}, Results{to, nullptr, true}, bytes);
}

}  // namespace ringcomm::cuda
