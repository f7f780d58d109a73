// Argument checks. Each throws RC_ARGUMENT, before anything is sent.
#pragma once

#include <cmath>

#include "core/call_record.h"
#include "core/errors.h"

namespace ringcomm {

constexpr int MAX_SIZE = 1 << 16;                  // ranks
constexpr uint64_t MAX_BYTES = uint64_t{1} << 62;  // of an array or a file: sums and products of two cannot overflow

// Inline: every small call checks some.
inline void check_pointer(const char* name, const void* pointer) {
    if (!pointer) [[unlikely]]
        rejectf("%s: expected a pointer, got NULL", name);
}
inline void check_seconds(const char* name, double seconds) {
    if (std::isnan(seconds)) [[unlikely]]
        rejectf("%s: expected seconds, got NaN", name);
}

void check_range(const char* name, int64_t value, int64_t least, int64_t most);
void check_size(int size);
void check_tuning(const rc_tuning* tuning);
// The bytes of `count` elements at `data`.
uint64_t checked_bytes(const char* name, const void* data, uint64_t count, int dtype);
// To allocate more than there is would take all memory from the machine before it fails.
void check_fits(uint64_t bytes);
void check_rank(const char* name, int value, int least, int size);
// `rank` of a group of `size` is the one numbered `own` among the `all` from which `members` are.
void check_members(int own, int all, int rank, int size, const int* members);
void check_collective(int collective);
void check_dtype(int dtype);
void check_reducible(int dtype, int op, bool on_gpu = false);
void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes);
CallRecord called(int collective, const rc_call& call, double timeout = -1);
// The bytes of the arrays that `rank` passes; 0: none. call.item is known.
struct ArrayBytes {
    uint64_t given, got;
};
ArrayBytes array_bytes(const CallRecord& call, int rank, int size);
// Also fills in call.item.
void check_call(CallRecord& call, int rank, int size, bool on_gpu = false);

}  // namespace ringcomm
