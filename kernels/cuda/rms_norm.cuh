// After an all_reduce in a transformer, in the same launch: the sum with the residual, and RMSNorm of its rows.
//
//   sum    = round(round(all_reduce) + residual)
//   scale  = 1 / sqrt(mean of the squares of a row of sum + epsilon), in float32
//   output = round(round(sum * scale) * weight)
//
// Each line rounds as its own operation does. The squares are summed in float64, so their order hardly ever changes the
// float32 mean, and the bits are then those of the operations one after another.
#pragma once

#include "call.cuh"
#include "ranges.cuh"

namespace ringcomm::cuda {

// The rows of the bytes `rows` of the sum, which the block has just reduced. Rows are whole packs, and aligned.
template <class Math>
RC_NOINLINE void rms_norm(const Ctx ctx, const Math math, const RmsNorm norm, byte* sums, Range rows) {
    const uint64_t row = norm.width * math.item, step = ctx.threads * PACK;
    block_sync(ctx);
    RC_NO_UNROLL for (uint64_t begin = rows.begin; begin < rows.end; begin += row) {
        double squares = 0;
        RC_NO_UNROLL for (uint64_t i = ctx.thread * PACK; i < row; i += step) {
            byte* const at = sums + begin + i;
            auto wide = math.partial(load16(at));
            math.combine(wide, math.partial(load16(norm.residual + begin + i)));
            const Pack sum = math.narrow(wide);
            store16(at, sum);
            squares += math.squares(sum);
        }
        const float mean = static_cast<float>(block_sum(ctx, squares) / static_cast<double>(norm.width));
        const float scale = 1 / square_root(mean + norm.epsilon);
        RC_NO_UNROLL for (uint64_t i = ctx.thread * PACK; i < row; i += step)
            store16(norm.output + begin + i, math.scaled(load16(sums + begin + i), scale, load16(norm.weight + i)));
    }
}

}  // namespace ringcomm::cuda
