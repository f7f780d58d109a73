// all_reduce, reduce and reduce_scatter in one step: each rank pushes to every peer what that reduces, and reduces its
// own part of all inputs in rank order. The start flag publishes the pushed data. The result has the CPU's bits: one
// rounding, at the end.
//
// Staging buffers of two parities: a rank that pushes for epoch e + 2 has seen this rank start e + 1, after it ended e.
#pragma once

#include "peers.cuh"
#include "ranges.cuh"
#include "reduce.cuh"
#include "rms_norm.cuh"

namespace ringcomm::cuda {

// `part(p)`: the range of the input that rank p reduces; of all of them this channel moves `mine`, at most `chunk`
// bytes at once. `agreed`: what all ranks must agree on. `finish(range)` is called where a range has been reduced.
template <class Math, class Part, class Finish>
RC_DEVICE void one_shot(Call& call, const Math& math, uint64_t agreed, Range mine, uint64_t chunk, Part part,
                        Finish finish) {
    const uint32_t stride = call.mine.layout.shape.stage_bytes;
    do {  // once even without data: every rank must start the call
        const auto piece = [&](int p) { return part(p).part(mine.begin, minimum(mine.end, mine.begin + chunk)); };
        call.next_epoch();
        for_each_peer(call, [&](const Ctx& ctx, int p) {
            const Range theirs = piece(p);
            copy(ctx, call.at(p).stage(call.epoch, call.me), call.args.input + theirs.begin, theirs.bytes());
        });
        call.signal_start(agreed);
        if (!call.await_start(agreed)) return;
        const Range own = piece(call.me);
        const Operands all{call.args.input + own.begin, call.me, call.mine.stage(call.epoch, 0), stride, call.n, true};
        reduce(call.ctx, math, all, Results{call.args.output + mine.begin, nullptr, true}, own.bytes());
        finish(own);
        mine.begin += chunk;
    } while (mine.begin < mine.end);
    call.end();
}

template <class Math, class Part>
RC_DEVICE void one_shot(Call& call, const Math& math, uint64_t agreed, uint64_t longest, Part part) {
    const uint32_t chunk = call.mine.layout.shape.stage_bytes;
    one_shot(call, math, agreed, channel_part(call.ctx, longest), chunk, part, [](Range) {});
}

// Each channel has whole rows.
template <class Math>
RC_DEVICE void one_shot_rms_norm(Call& call, const Math& math) {
    const RmsNorm& norm = call.args.norm;
    const uint64_t row = norm.width * math.item, rows = call.args.count / norm.width;
    const uint64_t each = divide_up(rows, call.ctx.blocks) * row,
                   chunk = call.mine.layout.shape.stage_bytes / row * row;
    const Range all{0, rows * row};
    const uint64_t agreed = mix(mix(call.args.count, norm.width), bits_as<uint32_t>(norm.epsilon));
    one_shot(
        call, math, agreed, all.part(call.ctx.block * each, (call.ctx.block + 1) * each), chunk,
        [&](int) { return all; }, [&](Range range) { rms_norm(call.ctx, math, norm, call.args.output, range); });
}

template <class Math>
RC_DEVICE void one_shot_all_reduce(Call& call, const Math& math) {
    if constexpr (Math::normalizes)
        if (call.args.norm.output) return one_shot_rms_norm(call, math);
    const Range all{0, call.args.count * math.item};
    one_shot(call, math, call.args.count, all.bytes(), [&](int) { return all; });
}

template <class Math>
RC_DEVICE void one_shot_reduce(Call& call, const Math& math) {
    const Range all{0, call.args.count * math.item};
    const int root = call.args.root;
    one_shot(call, math, call.args.count, all.bytes(), [&](int p) { return p == root ? all : Range{}; });
}

template <class Math>
RC_DEVICE void one_shot_reduce_scatter(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.send_offsets, call.args.count, math.item};
    one_shot(call, math, blocks.digest(call.n), blocks.largest(call.n), [&](int p) { return blocks[p]; });
}

}  // namespace ringcomm::cuda
