// all_reduce in one step: each rank pushes its input to every peer and reduces all inputs in rank order. The start flag
// publishes the pushed data. The result has the CPU's bits: one rounding, at the end.
//
// Staging buffers of two parities: a rank that pushes for epoch e + 2 has seen this rank start e + 1, after it ended e.
#pragma once

#include "partition.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

template <class Math>
RC_DEVICE void one_shot(Call& call, const Math& math) {
    const uint64_t chunk = call.mine.layout.shape.stage_bytes;
    const byte* input = call.args.input;
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {  // once even without data: every rank must start the call
        const uint64_t bytes = minimum(chunk, mine.end - at);
        call.next_epoch();
        RC_NO_UNROLL for (int d = 1; d < call.n; ++d) {
            const int p = (call.me + d) % call.n;
            copy(call.ctx, call.at(p).stage(call.epoch, call.me), input + at, bytes);
        }
        call.signal_start(call.args.count);
        if (!call.await_start(call.args.count)) return;
        const Operands all{input + at, call.me, call.mine.stage(call.epoch, 0), chunk, call.n, true};
        reduce(call.ctx, math, all, Results{call.args.output + at, nullptr, true}, bytes);
        at += bytes;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
