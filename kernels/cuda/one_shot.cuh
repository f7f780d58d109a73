// all_reduce in one step: everybody pushes its input to everybody, and each rank adds up all of them, in rank order.
// The start word publishes what was pushed. The same bits as on the CPU: one rounding, at the end.
//
// Staging of two parities: who pushes for epoch e + 2 has met this rank at e + 1, when it was through with epoch e.
#pragma once

#include "blocks.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

template <class Math>
RC_DEVICE void one_shot(Call& call, const Math& math) {
    const uint64_t room = call.mine.layout.shape.stage_bytes;
    const byte* input = call.args.input;
    const Range mine = share(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {  // a rank with nothing to do still meets the others
        const uint64_t bytes = minimum(room, mine.end - at);
        call.begin();
        RC_ROLL for (int d = 1; d < call.n; ++d) {
            const int p = (call.me + d) % call.n;
            copy(call.ctx, call.at(p).stage(call.epoch, call.me), input + at, bytes);
        }
        call.announce(call.args.count);
        if (!call.meet(call.args.count)) return;
        const Operands all{input + at, call.me, call.mine.stage(call.epoch, 0), room, call.n, true};
        reduce(call.ctx, math, all, Results{call.args.output + at, nullptr, true}, bytes);
        at += bytes;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
