#include "cuda/plan.h"

#include <algorithm>

#include "core/errors.h"

namespace ringcomm {
namespace {

using namespace cuda;

// Few bytes go to every rank at once, many along the ring, where each link carries the least data.
int kernel_for(int collective, uint64_t bytes, const rc_cuda_limits& limits) {
    switch (collective) {
        case RC_BARRIER: return BARRIER;
        case RC_ALL_REDUCE:
            if (bytes <= limits.ll) return LL;
            if (bytes <= limits.one_shot) return ONE_SHOT;
            return bytes <= limits.two_shot ? TWO_SHOT : RING_ALL_REDUCE;
        case RC_ALL_GATHER: return bytes <= limits.all_gather ? ALL_GATHER : RING_ALL_GATHER;
        case RC_BROADCAST: return bytes <= limits.broadcast ? BROADCAST : RING_BROADCAST;
        case RC_REDUCE: return bytes <= limits.one_shot_reduce ? ONE_SHOT_REDUCE : RING_REDUCE;
        case RC_REDUCE_SCATTER:
            return bytes <= limits.one_shot_reduce_scatter ? ONE_SHOT_REDUCE_SCATTER : RING_REDUCE_SCATTER;
        case RC_GATHER: return GATHER;
        case RC_SCATTER: return SCATTER;
        case RC_ALL_TO_ALL: return ALL_TO_ALL;
        default:
            rejectf("%s: expected arrays in host memory, since it has no CUDA kernel", collectives[collective].name);
    }
}

// By kernel.
constexpr bool reduces[] = {
#define KERNEL_ROW(name, NAME, collective) collectives[RC_##collective].reduces,
#include "ringcomm/types.def"
};

// A block of the grid moves what one rank stages at once: for all peers together where the kernel serves them so. Those
// of all_reduce and reduce were measured with fewer blocks.
uint64_t work_of(int kernel, uint64_t bytes, int size) {
    switch (kernel) {
        case ONE_SHOT_REDUCE_SCATTER:
        case BROADCAST:
        case GATHER:
        case SCATTER:
        case ALL_GATHER:
        case ALL_TO_ALL: return bytes * std::max(1, size - 1);
        default: return bytes;
    }
}

// A kernel that only moves data is compiled once for each size of an element.
int moved_as(size_t item) {
    switch (item) {
        case 1: return RC_UINT8;
        case 2: return RC_UINT16;
        case 4: return RC_UINT32;
        case 8: return RC_UINT64;
        default: return RC_COMPLEX128;
    }
}

bool is_whole(const Collective& row) { return row.given == Data::ARRAY; }

}  // namespace

LaunchPlan plan_launch(const CallRecord& call, int size, const Shape& shape, const rc_cuda_limits& limits, int kernel) {
    const Collective& row = collectives[call.collective];
    const bool moves_nothing = row.given == Data::NOTHING, whole = is_whole(row);
    const uint64_t* const counts = whole || moves_nothing ? nullptr : call.counts;
    const bool pairwise = counts && row.exchanges();  // only the two ranks of a pair know their counts
    const uint64_t longest = moves_nothing ? 0 : counts ? *std::max_element(counts, counts + size) : call.count;
    const uint64_t bytes = longest * call.item;
    const auto channels = uint64_t(shape.channels);
    if (kernel < 0) kernel = kernel_for(call.collective, bytes, limits);

    LaunchPlan plan{};
    plan.kernel = kernel;
    plan.dtype = reduces[kernel] ? call.dtype : moved_as(moves_nothing ? 1 : call.item);
    plan.op = reduces[kernel] ? call.op : int{RC_SUM};
    const uint64_t each = kernel == LL ? shape.line_bytes : shape.stage_bytes;
    plan.blocks = int(std::clamp<uint64_t>(divide_up(work_of(kernel, bytes, size), each), 1, channels));
    if (pairwise) plan.blocks = shape.channels;
    plan.with_tables =
        counts && (pairwise || std::any_of(counts, counts + size, [&](uint64_t count) { return count != counts[0]; }));
    plan.count = moves_nothing ? 0 : counts ? counts[0] : call.count;
    return plan;
}

CallBytes bytes_of(const CallRecord& call, int rank, int size) {
    const Collective& row = collectives[call.collective];
    const auto bytes = [&](Data holds, const uint64_t* counts) -> uint64_t {
        const Blocks blocks(call, counts);
        if (holds == Data::NOTHING) return 0;
        if (holds == Data::BLOCKS) return blocks.offset(size);
        return holds == Data::BLOCK ? blocks.bytes(rank) : call.bytes();
    };
    const auto involved = [&](Ranks ranks) { return ranks == Ranks::ALL || call.root == rank; };
    const bool gives = involved(row.given_by) || row.given == row.got;  // broadcast receives into the same array
    return {
        gives ? bytes(row.given, call.counts) : 0,
        involved(row.got_by) ? bytes(row.got, call.counts && row.exchanges() ? call.counts + size : call.counts) : 0};
}

}  // namespace ringcomm
