// The argument checks.
#include "abi/check.h"

#include <algorithm>

#include "core/collectives.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

void check_rank(const char* name, int value, int least, int size) {
    if (value < least || value >= size) reject(format("%s is %d, but the ranks are 0 to %d", name, value, size - 1));
}

void check_collective(int collective) {
    if (collective < 0 || collective >= RC_COLLECTIVES) reject(format("there is no collective %d", collective));
}

void check_dtype(int dtype) {
    if (dtype < 0 || dtype >= RC_DTYPES) reject(format("there is no dtype %d", dtype));
}

void check_reducible(int dtype, int op, bool on_gpu) {
    check_dtype(dtype);
    if (reducible(dtype, op, on_gpu)) return;
    std::string ops;
    for (int other = 0; other < RC_OPS; ++other) {
        if (reducible(dtype, other, on_gpu)) ops += (ops.empty() ? "" : ", ") + std::string(op_name(other));
    }
    if (ops.empty()) reject(format("dtype: expected one that the CPU reduces, got %s", dtype_name(dtype)));
    reject(format("op of %s: expected one of %s, got %s", dtype_name(dtype), ops.c_str(), op_name(op)));
}

void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes) {
    const auto from = static_cast<const std::byte*>(source), to = static_cast<const std::byte*>(target);
    if (!from || !to || !source_bytes || !target_bytes) return;
    if (from >= to + target_bytes || to >= from + source_bytes) return;
    reject("the output overlaps the input", "separate memory, or the place that a collective calls 'in place'",
           format("%zu bytes at %p into %zu at %p", source_bytes, source, target_bytes, target));
}

// Two buffers must be disjoint, or the same place as far as the collective allows it.
void check_overlap(const CallRecord& call, int rank, int size) {
    const Blocks blocks(call);
    const size_t all = blocks.offset(size), before = blocks.offset(rank);
    const Collective& collective = collectives[call.collective];
    const std::byte *source = call.source, *target = call.target;
    size_t source_bytes = call.bytes(), target_bytes = call.bytes();
    if (collective.given == Data::BLOCKS) source_bytes = all;
    if (collective.got == Data::BLOCKS) target_bytes = all;
    // The allowed form of "in place": the same memory, or this rank's block of the other.
    bool same = source == target;
    if (collective.given == Data::BLOCK && collective.got == Data::BLOCKS) same = source == target + before;
    if (collective.given == Data::BLOCKS && collective.got == Data::BLOCK) same = target == source + before;
    if (const uint64_t* counts = call.counts; counts && collective.exchanges()) {
        target_bytes = Blocks(call, counts + size).offset(size);
        same = same && std::equal(counts, counts + size, counts + size);
    }
    if (!same) check_disjoint(source, source_bytes, target, target_bytes);
}

void check_call(CallRecord& call, int rank, int size, bool on_gpu) {
    check_collective(call.collective);
    check_dtype(call.dtype);
    call.item = dtype_bytes(call.dtype);
    const Collective& collective = collectives[call.collective];
    if (collective.reduces) check_reducible(call.dtype, call.op, on_gpu);
    if (collective.rooted()) check_rank("root", call.root, 0, size);
    check_overlap(call, rank, size);
}

}  // namespace ringcomm
