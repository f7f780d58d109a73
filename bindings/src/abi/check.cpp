// The argument checks.
#include "abi/check.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <cinttypes>
#include <vector>

#include "core/collectives.h"
#include "kernels/cpu/kernels.h"
#include "memory/layout.h"

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
    if (tuning->heap_bytes % PAGE || tuning->heap_bytes > uint64_t{1} << 45) {
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

void check_fits(uint64_t bytes) {
    struct sysinfo machine{};
    if (sysinfo(&machine)) throw_errno("sysinfo");
    const uint64_t most = (machine.totalram + machine.totalswap) * machine.mem_unit;
    if (bytes <= most) return;
    throw Failure(RC_MEMORY, format("%" PRIu64 " bytes are more than the %" PRIu64 " of this machine", bytes, most));
}

void check_rank(const char* name, int value, int least, int size) {
    if (value < least || value >= size) rejectf("%s is %d, but the ranks are 0 to %d", name, value, size - 1);
}

void check_members(int own, int all, int rank, int size, const int* members) {
    check_range("size", size, 1, all);
    check_rank("rank", rank, 0, size);
    check_pointer("members", members);
    std::vector<bool> seen(all);
    for (int r = 0; r < size; ++r) {
        check_rank("a member", members[r], 0, all);
        if (seen[members[r]]) rejectf("rank %d is a member twice", members[r]);
        seen[members[r]] = true;
    }
    if (members[rank] != own) rejectf("rank %d is member %d, not %d", own, members[rank], rank);
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

// Bytes of an array that holds this on `rank`. Without a division: it would cost a hundredth of a small call.
inline uint64_t check_bytes(const CallRecord& call, Data holds, const uint64_t* counts, int rank, int size) {
    if (holds == Data::NOTHING) return 0;
    uint64_t count = call.count, bytes = 0;
    bool overflows = false;
    if (holds == Data::BLOCK && counts) {
        count = counts[rank];
    } else if (holds == Data::BLOCKS && counts) {
        count = 0;
        for (int r = 0; r < size; ++r) overflows |= __builtin_add_overflow(count, counts[r], &count);
    } else if (holds == Data::BLOCKS) {
        overflows = __builtin_mul_overflow(call.count, uint64_t(size), &count);
    }
    overflows |= __builtin_mul_overflow(count, uint64_t{call.item}, &bytes);
    if (overflows || bytes > MAX_BYTES) {
        rejectf("the blocks of %d ranks of %s are larger than any memory", holds == Data::BLOCKS ? size : 1,
                dtype_name(call.dtype));
    }
    return bytes;
}

// Also of an array that only other ranks pass.
inline ArrayBytes all_bytes(const CallRecord& call, int rank, int size) {
    const Collective& moves = movement_of(call.collective);
    const uint64_t* to_get = call.counts && moves.exchanges() ? call.counts + size : call.counts;
    return {check_bytes(call, moves.given, call.counts, rank, size), check_bytes(call, moves.got, to_get, rank, size)};
}

// Two buffers must be disjoint, or the same place as far as the collective allows it.
inline void check_buffers(const CallRecord& call, int rank, int size) {
    const Collective& collective = movement_of(call.collective);
    const ArrayBytes bytes = all_bytes(call, rank, size);
    if (bytes.given && collective.gives(rank, call.root)) check_pointer("source", call.source);
    if (bytes.got && collective.gets(rank, call.root)) check_pointer("target", call.target);
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
    if (!same) check_disjoint(source, bytes.given, target, bytes.got);
}

}  // namespace

ArrayBytes array_bytes(const CallRecord& call, int rank, int size) {
    const Collective& moves = movement_of(call.collective);
    const ArrayBytes all = all_bytes(call, rank, size);
    return {moves.gives(rank, call.root) ? all.given : 0, moves.gets(rank, call.root) ? all.got : 0};
}

void check_call(CallRecord& call, int rank, int size, bool on_gpu) {
    check_collective(call.collective);
    check_dtype(call.dtype);
    call.item = dtype_bytes(call.dtype);
    const Collective& collective = collectives[call.collective];
    if (collective.reduces) check_reducible(call.dtype, call.op, on_gpu);
    if (collective.rooted()) check_rank("root", call.root, 0, size);
    if (call.counts && !movement_of(call.collective).divides()) {
        rejectf("counts: expected NULL, since %s does not divide its arrays", collective.name);
    }
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
            timeout,
            call.deferred_mismatch};
}

}  // namespace ringcomm
