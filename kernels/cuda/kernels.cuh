// All kernels by number. A kernel that only moves data ignores the operation and takes any dtype of the right size.
#pragma once

#include "all_pairs.cuh"
#include "ll.cuh"
#include "one_shot.cuh"
#include "ring.cuh"
#include "two_shot.cuh"

namespace ringcomm::cuda {

enum Kernel {
#define KERNEL_ROW(name, NAME, collective) NAME,
#include "ringcomm/types.def"
    KERNELS
};

template <int kernel, class Math>
RC_DEVICE void carry_out(Call& call, const Math& math) {
    if constexpr (kernel == BARRIER) {
        if (call.start(call.args.count)) call.end();
    }
    if constexpr (kernel == RING_ALL_REDUCE) ring_all_reduce(call, math);
    if constexpr (kernel == RING_REDUCE_SCATTER) ring_reduce_scatter(call, math);
    if constexpr (kernel == RING_REDUCE) ring_reduce(call, math);
    if constexpr (kernel == ONE_SHOT) one_shot_all_reduce(call, math);
    if constexpr (kernel == ONE_SHOT_REDUCE) one_shot_reduce(call, math);
    if constexpr (kernel == ONE_SHOT_REDUCE_SCATTER) one_shot_reduce_scatter(call, math);
    if constexpr (kernel == TWO_SHOT) two_shot(call, math);
    if constexpr (kernel == LL) ll(call, math);
    if constexpr (kernel == RING_ALL_GATHER) ring_all_gather(call, math);
    if constexpr (kernel == RING_BROADCAST) ring_broadcast(call, math);
    if constexpr (kernel == BROADCAST) broadcast(call, math);
    if constexpr (kernel == GATHER) gather(call, math);
    if constexpr (kernel == SCATTER) scatter(call, math);
    if constexpr (kernel == ALL_GATHER) all_gather(call, math);
    if constexpr (kernel == ALL_TO_ALL) all_to_all(call, math);
}

template <int kernel, class Math>
RC_DEVICE void run(const Ctx& ctx, const Args& args) {
    const Math math(args);
    Call call(ctx, args);
    call.report_start();
    if (call.usable()) carry_out<kernel>(call, math);
    call.report_end();
}

// Several ranks in one grid, each with `blocks` blocks. On a GPU their arguments are passed by value, as those of one
// rank are: global memory would be read anew after every wait.
struct VirtualRanks {
    static constexpr int MOST = 8;
    Args of[MOST];
};

template <int kernel, class Math>
RC_DEVICE void run_virtual(const Ctx& grid, const Args* ranks, int blocks) {
    Ctx ctx = grid;
    ctx.block = grid.block % blocks;
    ctx.blocks = blocks;
    run<kernel, Math>(ctx, ranks[grid.block / blocks]);
}

}  // namespace ringcomm::cuda
