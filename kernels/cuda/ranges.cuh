// Which bytes belong to a rank, and which of those a channel moves.
#pragma once

#include "call.cuh"

namespace ringcomm::cuda {

struct Range {
    uint64_t begin, end;
    RC_DEVICE uint64_t bytes() const { return end - begin; }
    // Bytes `from` to `to`, cut at the end of this range.
    RC_DEVICE Range part(uint64_t from, uint64_t to) const {
        return {minimum(begin + from, end), minimum(begin + to, end)};
    }
};

// The part of `bytes` that this channel moves: whole packs, so that the parts of an aligned array are aligned.
RC_DEVICE Range channel_part(const Ctx& ctx, uint64_t bytes) {
    const uint64_t each = round_up(divide_up(bytes, ctx.blocks), PACK);
    return Range{0, bytes}.part(ctx.block * each, (ctx.block + 1) * each);
}

// An array of one block for each rank: `count` elements each, or between the offsets of a table.
struct RankBlocks {
    const uint64_t* offsets;
    uint64_t count, item;

    RC_DEVICE Range operator[](int rank) const {
        if (offsets) return {offsets[rank] * item, offsets[rank + 1] * item};
        return {rank * count * item, (rank + 1) * count * item};
    }
    RC_DEVICE uint64_t largest(int n) const {
        uint64_t most = offsets ? 0 : count * item;
        for (int p = 0; offsets && p < n; ++p) most = (*this)[p].bytes() > most ? (*this)[p].bytes() : most;
        return most;
    }
    // Equal on two ranks whose blocks are equal.
    RC_DEVICE uint64_t digest(int n) const {
        uint64_t hash = offsets ? n : count;
        for (int p = 0; offsets && p <= n; ++p) hash = mix(hash, offsets[p]);
        return hash;
    }
};

}  // namespace ringcomm::cuda
