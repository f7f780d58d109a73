// The argument checks.
#include "abi/check.h"

#include <algorithm>
#include <cinttypes>

#include "core/collectives.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    rejectf("%s: expected %" PRId64 " to %" PRId64 ", got %" PRId64, name, least, most, value);
}

void check_size(int size) { check_range("size", size, 1, MAX_SIZE); }

void check_tuning(const rc_tuning* tuning) {
    check_pointer("tuning", tuning);
    check_seconds("tuning.timeout", tuning->timeout);
    if (tuning->timeout < 0) rejectf("tuning.timeout: expected at least 0 seconds, got %g", tuning->timeout);
    if (tuning->segment_bytes == 0) reject("tuning.segment_bytes: expected at least 1, got 0");
    for (uint64_t bytes : {tuning->arena_bytes, tuning->sub_arena_bytes}) {
        if (bytes > MAX_BYTES) rejectf("tuning: an arena of %" PRIu64 " bytes is too large", bytes);
    }
    if (tuning->heap_bytes % 4096 || tuning->heap_bytes > uint64_t{1} << 45) {
        rejectf("tuning.heap_bytes: expected whole pages up to 32 TiB, got %" PRIu64, tuning->heap_bytes);
    }
}

uint64_t checked_bytes(const char* name, const void* data, uint64_t count, int dtype) {
    check_dtype(dtype);
    if (count > MAX_BYTES / dtype_bytes(dtype)) {
        rejectf("%s: %" PRIu64 " x %s is larger than any memory", name, count, dtype_name(dtype));
    }
    if (count) check_pointer(name, data);
    return count * dtype_bytes(dtype);
}

void check_rank(const char* name, int value, int least, int size) {
    if (value < least || value >= size) rejectf("%s is %d, but the ranks are 0 to %d", name, value, size - 1);
}

void check_collective(int collective) {
    if (collective < 0 || collective >= RC_COLLECTIVES) rejectf("there is no collective %d", collective);
}

void check_dtype(int dtype) {
    if (dtype < 0 || dtype >= RC_DTYPES) rejectf("there is no dtype %d", dtype);
}

void check_reducible(int dtype, int op, bool on_gpu) {
    check_dtype(dtype);
    if (reducible(dtype, op, on_gpu)) return;
    std::string ops;
    for (int other = 0; other < RC_OPS; ++other) {
        if (reducible(dtype, other, on_gpu)) ops += (ops.empty() ? "" : ", ") + std::string(op_name(other));
    }
    if (ops.empty()) rejectf("dtype: expected one that the CPU reduces, got %s", dtype_name(dtype));
    rejectf("op of %s: expected one of %s, got %s", dtype_name(dtype), ops.c_str(), op_name(op));
}

void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes) {
    const auto from = static_cast<const std::byte*>(source), to = static_cast<const std::byte*>(target);
    if (!from || !to || !source_bytes || !target_bytes) return;
    if (from >= to + target_bytes || to >= from + source_bytes) return;
    reject("the output overlaps the input", "separate memory, or the place that a collective calls 'in place'",
           format("%zu bytes at %p into %zu at %p", source_bytes, source, target_bytes, target));
}

namespace {

// Bytes of all blocks. Without a division: it would cost a hundredth of a small call.
inline uint64_t check_blocks(const CallRecord& call, const uint64_t* counts, int size) {
    uint64_t count = 0, bytes = 0;
    bool overflows = false;
    if (counts) {
        for (int r = 0; r < size; ++r) overflows |= __builtin_add_overflow(count, counts[r], &count);
    } else {
        overflows = __builtin_mul_overflow(call.count, uint64_t(size), &count);
    }
    overflows |= __builtin_mul_overflow(count, uint64_t{call.item}, &bytes);
    if (overflows || bytes > MAX_BYTES) {
        rejectf("the blocks of %d ranks of %s are larger than any memory", size, dtype_name(call.dtype));
    }
    return bytes;
}

// Returns the bytes of a buffer that holds this, and rejects NULL if this rank needs it.
inline uint64_t check_buffer(const char* name, const void* data, Data holds, bool needed, const CallRecord& call,
                             const uint64_t* counts, int size) {
    uint64_t bytes = 0;
    if (holds == Data::BLOCKS) {
        bytes = check_blocks(call, counts, size);
    } else if (holds != Data::NOTHING) {
        bytes = check_blocks(call, nullptr, 1);
    }
    if (bytes && needed) check_pointer(name, data);
    return bytes;
}

// Two buffers must be disjoint, or the same place as far as the collective allows it.
inline void check_buffers(const CallRecord& call, int rank, int size) {
    const Collective& collective = collectives[call.collective];
    const auto involved = [&](Ranks ranks) { return ranks == Ranks::ALL || call.root == rank; };
    const uint64_t* to_get = call.counts && collective.exchanges() ? call.counts + size : call.counts;
    const size_t source_bytes =
        check_buffer("source", call.source, collective.given, involved(collective.given_by), call, call.counts, size);
    const size_t target_bytes =
        check_buffer("target", call.target, collective.got, involved(collective.got_by), call, to_get, size);
    const Blocks blocks(call);
    const size_t before = blocks.offset(rank);
    const std::byte *source = call.source, *target = call.target;
    // The allowed form of "in place": the same memory, or this rank's block of the other.
    bool same = source == target;
    if (collective.given == Data::BLOCK && collective.got == Data::BLOCKS) same = source == target + before;
    if (collective.given == Data::BLOCKS && collective.got == Data::BLOCK) same = target == source + before;
    if (const uint64_t* counts = call.counts; counts && collective.exchanges()) {
        same = same && std::equal(counts, counts + size, counts + size);
    }
    if (!same) check_disjoint(source, source_bytes, target, target_bytes);
}

}  // namespace

void check_call(CallRecord& call, int rank, int size, bool on_gpu) {
    check_collective(call.collective);
    check_dtype(call.dtype);
    call.item = dtype_bytes(call.dtype);
    const Collective& collective = collectives[call.collective];
    if (collective.reduces) check_reducible(call.dtype, call.op, on_gpu);
    if (collective.rooted()) check_rank("root", call.root, 0, size);
    check_buffers(call, rank, size);
}

CallRecord called(int collective, const rc_call& call, double timeout) {
    return {collective,
            static_cast<const std::byte*>(call.source),
            static_cast<std::byte*>(call.target),
            call.count,
            call.dtype,
            call.op,
            call.factor,
            call.root,
            call.counts,
            timeout};
}

}  // namespace ringcomm
