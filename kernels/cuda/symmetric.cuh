// Symmetric buffers. Where all ranks have their arrays at the same place of such a buffer, each reads or writes those
// of the others where they are: nothing is staged. All must be there before, and through with it after: two meetings.
// The sums have the same bits as on the CPU.
//
// Broadcast and reduce stay with the ring, where no link carries more than the array once.
#pragma once

#include "blocks.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

// One number for the places of a call; 0: not all that matter are in symmetric buffers.
RC_DEVICE uint64_t place_of(const Place& place, uint64_t hash = 1) {
    return place.bases ? mix(mix(hash, place.buffer), place.offset) | 1 : 0;
}
RC_DEVICE uint64_t place_of(const Place& input, const Place& output) {
    return input.bases && output.bases ? place_of(output, place_of(input)) : 0;
}

// The inputs of all ranks from byte `begin` on, as operands.
struct AllInputs {
    Place place;
    uint64_t begin;
    int count;

    RC_DEVICE const byte* at(int i) const { return place.at(i) + begin; }
    RC_DEVICE bool input(int) const { return true; }
    RC_DEVICE uint64_t alignment() const { return place.offset + begin; }  // a buffer begins at a page
};

// The outputs of all ranks, in which the result goes; this rank's own is the first.
struct AllOutputs {
    Place place;
    uint64_t begin;
    int n, me;
    static constexpr bool last = true;

    template <class Store>
    RC_DEVICE void each(Store store) const {
        int p = me;
        RC_ROLL for (int d = 0; d < n; ++d) {
            store(place.at(p) + begin);
            p = p + 1 < n ? p + 1 : 0;
        }
    }
    RC_DEVICE uint64_t alignment() const { return place.offset + begin; }
};

RC_DEVICE void meet_again(Call& call) {
    if (call.start(call.args.count)) call.end();
}

template <class Math>
RC_DEVICE void symmetric_all_reduce(Call& call, const Math& math) {
    const Range mine = share(call.ctx, call.args.count * math.item);
    const uint64_t each = round_up(divide_up(mine.bytes(), call.n), PACK);
    const Range own = mine.part(call.me * each, (call.me + 1) * each);
    const AllInputs inputs{call.args.input_place, own.begin, call.n};
    reduce(call.ctx, math, inputs, AllOutputs{call.args.output_place, own.begin, call.n, call.me}, own.bytes());
    meet_again(call);
}

template <class Math>
RC_DEVICE void symmetric_reduce_scatter(Call& call, const Math& math, const Blocks& blocks) {
    const Range block = blocks[call.me], mine = share(call.ctx, block.bytes());
    const AllInputs inputs{call.args.input_place, block.begin + mine.begin, call.n};
    reduce(call.ctx, math, inputs, Results{call.args.output + mine.begin, nullptr, true}, mine.bytes());
    meet_again(call);
}

RC_DEVICE void symmetric_all_gather(Call& call, const Blocks& blocks) {
    const Range block = blocks[call.me], mine = share(call.ctx, block.bytes());
    const Operands own{call.args.input + mine.begin, 0, nullptr, 0, 1, true};
    const AllOutputs outputs{call.args.output_place, block.begin + mine.begin, call.n, call.me};
    reduce(call.ctx, Moving(), own, outputs, mine.bytes());
    meet_again(call);
}

// Of equal blocks: where those of other ranks begin is known only then.
RC_DEVICE void symmetric_all_to_all(Call& call, const Blocks& blocks) {
    const Range block = blocks[call.me], mine = share(call.ctx, block.bytes());
    RC_ROLL for (int d = 0; d < call.n; ++d) {
        const int p = (call.me + d) % call.n;
        const byte* there = call.args.input_place.at(p) + block.begin;
        copy(call.ctx, call.args.output + blocks[p].begin + mine.begin, there + mine.begin, mine.bytes());
    }
    meet_again(call);
}

}  // namespace ringcomm::cuda
