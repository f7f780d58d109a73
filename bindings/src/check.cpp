#include "check.h"

#include <algorithm>

namespace ringcomm {

void refuse(const std::string& message, const std::string& expected, const std::string& got) {
    Failure failure(RC_ARGUMENT, message);
    copy_text(failure.error.expected, sizeof failure.error.expected, expected);
    copy_text(failure.error.got, sizeof failure.error.got, got);
    throw failure;
}

void check_rank(const char* name, int value, int least, int size) {
    if (value < least || value >= size) refuse(format("%s is %d, but the ranks are 0 to %d", name, value, size - 1));
}

void check_collective(int collective) {
    if (collective < 0 || collective >= RC_COLLECTIVES) refuse(format("there is no collective %d", collective));
}

void check_dtype(int dtype) {
    if (dtype < 0 || dtype >= RC_DTYPES) refuse(format("there is no dtype %d", dtype));
}

void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes) {
    const auto from = static_cast<const std::byte*>(source), to = static_cast<const std::byte*>(target);
    if (!from || !to || !source_bytes || !target_bytes) return;
    if (from >= to + target_bytes || to >= from + source_bytes) return;
    refuse("the output overlaps the input", "separate memory, or the place that a collective calls 'in place'",
           format("%zu bytes at %p into %zu at %p", source_bytes, source, target_bytes, target));
}

// Two buffers must be disjoint, or the same place as far as the collective allows it.
void check_overlap(const Call& call, int rank, int size) {
    const Blocks blocks(call);
    const size_t all = blocks.offset(size), before = blocks.offset(rank);
    const std::byte *source = call.source, *target = call.target;
    size_t source_bytes = call.bytes(), target_bytes = call.bytes();
    bool same = source == target;  // the allowed form of "in place"
    switch (call.collective) {
        case RC_GATHER:
        case RC_ALL_GATHER:
            target_bytes = all;
            same = source == target + before;
            break;
        case RC_SCATTER:
        case RC_REDUCE_SCATTER:
            source_bytes = all;
            same = target == source + before;
            break;
        case RC_ALL_TO_ALL:
            source_bytes = target_bytes = all;
            if (const uint64_t* counts = call.counts) {
                target_bytes = Blocks(call, counts + size).offset(size);
                same = same && std::equal(counts, counts + size, counts + size);
            }
            break;
        default: break;
    }
    if (!same) check_disjoint(source, source_bytes, target, target_bytes);
}

void check_call(Call& call, int rank, int size) {
    check_collective(call.collective);
    check_dtype(call.dtype);
    call.item = dtype_bytes(call.dtype);
    switch (call.collective) {
        case RC_REDUCE:
        case RC_ALL_REDUCE:
        case RC_REDUCE_SCATTER:
            if (!rc_reducible(call.dtype, call.op)) {
                refuse(format("%s of %s makes no sense or is not supported", op_name(call.op), dtype_name(call.dtype)));
            }
            break;
        default: break;
    }
    switch (call.collective) {
        case RC_BROADCAST:
        case RC_REDUCE:
        case RC_GATHER:
        case RC_SCATTER: check_rank("root", call.root, 0, size); break;
        default: break;
    }
    check_overlap(call, rank, size);
}

}  // namespace ringcomm
