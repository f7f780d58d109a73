// all_reduce in two steps: rank j gets segment j of everybody, adds it up in rank order, and pushes the result to
// everybody. Each rank sends and receives 2 (n - 1) / n of the array, in two hops. The same bits as on the CPU.
//
// Inputs are staged as in one_shot.cuh. Results go through slots: whoever has met all ranks finds them empty, and each
// is filled once in an epoch.
#pragma once

#include "blocks.cuh"
#include "pipe.cuh"

namespace ringcomm::cuda {

template <class Math>
RC_DEVICE bool two_shot_chunk(Call& call, const Math& math, Range chunk) {
    const Ctx& ctx = call.ctx;
    const byte* input = call.args.input;
    byte* output = call.args.output;
    const uint64_t each = round_up(divide_up(chunk.bytes(), call.n), PACK);
    const auto segment = [&](int r) { return chunk.part(r * each, (r + 1) * each); };
    const Range own = segment(call.me);

    RC_ROLL for (int d = 1; d < call.n; ++d) {
        const int p = (call.me + d) % call.n;
        copy(ctx, call.at(p).stage(call.epoch, call.me), input + segment(p).begin, segment(p).bytes());
    }
    call.announce(call.args.count);
    if (!call.meet(call.args.count)) return false;
    const uint64_t stride = call.mine.layout.shape.stage_bytes;
    const Operands all{input + own.begin, call.me, call.mine.stage(call.epoch, 0), stride, call.n, true};
    reduce(ctx, math, all, Results{output + own.begin, nullptr, true}, own.bytes());

    block_sync(ctx);
    RC_ROLL for (int d = 1; d < call.n; ++d) {
        const Outlet out(call, SHARED, (call.me + d) % call.n, call.epoch);
        copy(ctx, out.slots, output + own.begin, own.bytes());
    }
    block_sync(ctx);
    bool well = true;
    for (int p = ctx.thread; p < call.n; p += ctx.threads)
        if (p != call.me) Outlet(call, SHARED, p, call.epoch).filled();
    for (int p = ctx.thread; p < call.n; p += ctx.threads)
        if (p != call.me) well = well && Inlet(call, SHARED, p, call.epoch).arrived();
    if (!call.agreed(well)) return false;
    RC_ROLL for (int d = 1; d < call.n; ++d) {
        const int p = (call.me + d) % call.n;
        copy(ctx, output + segment(p).begin, call.mine.pair_slots(p), segment(p).bytes());
    }
    return true;
}

template <class Math>
RC_DEVICE void two_shot(Call& call, const Math& math) {
    const Shape& shape = call.mine.layout.shape;
    const uint64_t room = call.n * minimum(shape.stage_bytes, uint64_t(shape.slots) * call.mine.layout.pair_bytes);
    const Range mine = share(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {
        const Range chunk{at, minimum(mine.end, at + room)};
        call.begin();
        if (!two_shot_chunk(call, math, chunk)) return;
        at = chunk.end;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
