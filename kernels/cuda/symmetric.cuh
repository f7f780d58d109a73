// Symmetric buffers. Where all ranks have their arrays at the same location of a symmetric buffer, each accesses those
// of its peers directly, without staging. A second start makes every rank wait until its peers have finished. What is
// short takes one start on its usual path: all_gather, reduce_scatter and all_to_all of blocks that are staged at once.
// The sums have the CPU's bits, unless a switch makes them.
//
// Broadcast and reduce stay with the ring, where no link carries the array more than once.
#pragma once

#include "nvls.cuh"
#include "ranges.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

// A digest of the locations that a call needs; 0: one of them is in no symmetric buffer.
RC_DEVICE uint64_t digest_of(const Location& location, uint64_t hash = 1) {
    hash = mix(mix(hash, location.buffer), location.offset << 1 | (location.multicast != nullptr));
    return location.bases ? hash | 1 : 0;
}
RC_DEVICE uint64_t digest_of(const Location& input, const Location& output) {
    return input.bases && output.bases ? digest_of(output, digest_of(input)) : 0;
}

// The inputs of all ranks from byte `begin` on, as operands.
struct AllInputs {
    Location location;
    uint64_t begin;
    int count;

    RC_DEVICE const byte* at(int i) const { return location.at(i) + begin; }
    RC_DEVICE bool is_input(int) const { return true; }
    RC_DEVICE uint64_t alignment() const { return location.offset + begin; }  // a buffer begins at a page
};

// The outputs of all ranks, each of which gets the result; this rank's own first.
struct AllOutputs {
    Location location;
    uint64_t begin;
    int n, me;
    static constexpr bool complete = true;

    template <class Store>
    RC_DEVICE void each(Store store) const {
        int p = me;
        RC_NO_UNROLL for (int d = 0; d < n; ++d) {
            store(location.at(p) + begin);
            p = p + 1 < n ? p + 1 : 0;
        }
    }
    RC_DEVICE uint64_t alignment() const { return location.offset + begin; }
};

RC_DEVICE void await_peers_and_end(Call& call) {
    if (call.start(call.args.count)) call.end();
}

template <class Math>
RC_DEVICE void symmetric_all_reduce(Call& call, const Math& math) {
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    const uint64_t each = round_up(divide_up(mine.bytes(), call.n), PACK);
    Range own = mine.part(call.me * each, (call.me + 1) * each);
    if constexpr (Math::multimem) {
        const Multicast from{call.args.input_location, own.begin, call.n};
        const Multicast to{call.args.output_location, own.begin, call.n};
        own.begin += move_by_nvls(call.ctx, MulticastSum<Math>{math, from}, to, own.bytes());
    }
    const AllInputs inputs{call.args.input_location, own.begin, call.n};
    reduce(call.ctx, math, inputs, AllOutputs{call.args.output_location, own.begin, call.n, call.me}, own.bytes());
    await_peers_and_end(call);
}

template <class Math>
RC_DEVICE void symmetric_reduce_scatter(Call& call, const Math& math, const RankBlocks& blocks) {
    const Range block = blocks[call.me];
    Range mine = channel_part(call.ctx, block.bytes());
    if constexpr (Math::multimem) {
        const Multicast from{call.args.input_location, block.begin + mine.begin, call.n};
        mine.begin += move_by_nvls(call.ctx, MulticastSum<Math>{math, from}, OwnPacks{call.args.output + mine.begin},
                                   mine.bytes());
    }
    const AllInputs inputs{call.args.input_location, block.begin + mine.begin, call.n};
    reduce(call.ctx, math, inputs, Results{call.args.output + mine.begin, nullptr, true}, mine.bytes());
    await_peers_and_end(call);
}

RC_DEVICE void symmetric_all_gather(Call& call, const RankBlocks& blocks) {
    const Range block = blocks[call.me];
    Range mine = channel_part(call.ctx, block.bytes());
    if constexpr (HAS_MULTIMEM) {
        const OwnPacks from{const_cast<byte*>(call.args.input) + mine.begin};
        const Multicast to{call.args.output_location, block.begin + mine.begin, call.n};
        mine.begin += move_by_nvls(call.ctx, from, to, mine.bytes());
    }
    const Operands own{call.args.input + mine.begin, 0, nullptr, 0, 1, true};
    const AllOutputs outputs{call.args.output_location, block.begin + mine.begin, call.n, call.me};
    reduce(call.ctx, Copy(), own, outputs, mine.bytes());
    await_peers_and_end(call);
}

// Equal blocks only: otherwise a rank does not know where its peers' blocks begin.
RC_DEVICE void symmetric_all_to_all(Call& call, const RankBlocks& blocks) {
    const Range block = blocks[call.me], mine = channel_part(call.ctx, block.bytes());
    RC_NO_UNROLL for (int d = 0; d < call.n; ++d) {
        const int p = (call.me + d) % call.n;
        const byte* theirs = call.args.input_location.at(p) + block.begin;
        copy(call.ctx, call.args.output + blocks[p].begin + mine.begin, theirs + mine.begin, mine.bytes());
    }
    await_peers_and_end(call);
}

}  // namespace ringcomm::cuda
