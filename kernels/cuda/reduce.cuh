// One pass of a block over memory: copy, or combine and copy. All packs of a tile are read before any is written, so a
// result may lie where an operand lies.
#pragma once

#include "ops.cuh"

namespace ringcomm::cuda {

// Accesses without alignment are made of the widest ones that the address allows; what is less than a pack, of bytes.
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
struct Anywhere {
    uint64_t bytes;

    RC_DEVICE uint64_t alignment(const byte* at) const { return bytes < PACK ? 1 : reinterpret_cast<uint64_t>(at); }
    RC_DEVICE Pack load(const byte* at) const {
        const uint64_t to = alignment(at);
        if (to % 16 == 0) return load16(at);
        if (to % 4 == 0) return load_parts<uint32_t>(at, PACK);
        if (to % 2 == 0) return load_parts<uint16_t>(at, PACK);
        return load_parts<uint8_t>(at, bytes);
    }
    RC_DEVICE void store(byte* at, const Pack& pack) const {
        const uint64_t to = alignment(at);
        if (to % 16 == 0) return store16(at, pack);
        if (to % 4 == 0) return store_parts<uint32_t>(at, pack, PACK);
        if (to % 2 == 0) return store_parts<uint16_t>(at, pack, PACK);
        store_parts<uint8_t>(at, pack, bytes);
    }
};

// A pack at a multiple of 16, and of 4.
struct Aligned {
    RC_DEVICE Pack load(const byte* at) const { return load16(at); }
    RC_DEVICE void store(byte* at, const Pack& pack) const { store16(at, pack); }
};
struct Words {
    RC_DEVICE Pack load(const byte* at) const { return load_parts<uint32_t>(at, PACK); }
    RC_DEVICE void store(byte* at, const Pack& pack) const { store_parts<uint32_t>(at, pack, PACK); }
};

// What is combined, in the order of the ranks: this rank's own input at its place, the others `stride` bytes apart.
struct Operands {
    const byte* own;
    int place;           // -1: there is no own one
    const byte* others;  // counted as if the own one lay among them
    uint64_t stride;
    int count;
    bool inputs;  // the others are inputs as well, and not the sums of several

    RC_DEVICE const byte* at(int i) const { return i == place ? own : others + i * stride; }
    RC_DEVICE bool input(int i) const { return inputs || i == place; }
    RC_DEVICE uint64_t alignment() const {
        return reinterpret_cast<uint64_t>(own) | reinterpret_cast<uint64_t>(others) | stride;
    }
};

// Where the result goes; null: nowhere.
struct Results {
    byte* keep;
    byte* pass;
    bool last;  // it is the whole result, not the sum of some

    template <class Store>
    RC_DEVICE void each(Store store) const {
        if (keep) store(keep);
        if (pass) store(pass);
    }
    RC_DEVICE uint64_t alignment() const { return reinterpret_cast<uint64_t>(keep) | reinterpret_cast<uint64_t>(pass); }
};

// The arithmetic of a copy.
struct Moving {
    using Wide = Pack;
    static constexpr int tile = 4;
    RC_DEVICE Pack input(const Pack& pack) const { return pack; }
    RC_DEVICE Pack partial(const Pack& pack) const { return pack; }
    RC_DEVICE void combine(Pack&, const Pack&) const {}
    RC_DEVICE Pack narrow(const Pack& pack) const { return pack; }
    RC_DEVICE Pack output(const Pack& pack) const { return pack; }
};

// `tile` packs, as far apart as a warp is wide: a distance that the compiler knows needs no register for each of them.
// All are asked for before the first is looked at.
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
    const auto taken = [&](int i, int t) { return from.input(i) ? math.input(packs[t]) : math.partial(packs[t]); };
    typename Math::Wide acc[tile];
    load(0);
    RC_UNROLL for (int t = 0; t < tile; ++t) acc[t] = taken(0, t);
    RC_ROLL for (int i = 1; i < from.count; ++i) {
        load(i);
        RC_UNROLL for (int t = 0; t < tile; ++t) math.combine(acc[t], taken(i, t));
    }
    RC_UNROLL for (int t = 0; t < tile; ++t) packs[t] = to.last ? math.output(acc[t]) : math.narrow(acc[t]);
    to.each(store);
}

// The whole tiles of the block; returns the bytes that they are.
template <int tile, class Math, class From, class To, class Access>
RC_DEVICE uint64_t reduce_tiles(const Ctx& ctx, const Math& math, const From& from, const To& to, uint64_t bytes,
                                const Access& access) {
    const uint64_t tiles = tile * ctx.threads * PACK;  // what the block does at once
    const uint64_t first = ctx.thread / WARP * (WARP * tile) + ctx.thread % WARP;
    uint64_t done = 0;
    RC_ROLL for (; done + tiles <= bytes; done += tiles) reduce_tile<tile>(math, from, to, done + first * PACK, access);
    return done;
}

// By value: what is behind a reference lies in memory, and would be read again after each access to other memory.
template <class Math, class From, class To>
RC_CALLED void reduce(const Ctx ctx, const Math math, const From from, const To to, uint64_t bytes) {
    const uint64_t alignment = from.alignment() | to.alignment();
    uint64_t done = 0;
    if (alignment % PACK == 0)  // the loop that counts
        done = reduce_tiles<Math::tile>(ctx, math, from, to, bytes, Aligned());
    else if (alignment % 4 == 0)
        done = reduce_tiles<2>(ctx, math, from, to, bytes, Words());
    RC_ROLL for (uint64_t at = done + ctx.thread * PACK; at < bytes; at += ctx.threads * PACK)
        reduce_tile<1>(math, from, to, at, Anywhere{minimum(PACK, bytes - at)});
}

RC_DEVICE void copy(const Ctx& ctx, byte* to, const byte* from, uint64_t bytes) {
    if (to != from) reduce(ctx, Moving(), Operands{from, 0, nullptr, 0, 1, true}, Results{to, nullptr, true}, bytes);
}

}  // namespace ringcomm::cuda
