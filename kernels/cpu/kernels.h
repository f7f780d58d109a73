// The CPU kernels: one table per instruction set. Callers use `kernels()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kinds.h"
#include "ringcomm.h"

namespace ringcomm {

// Whether an operation is defined for a kind of dtypes.
constexpr bool legal(Kind kind, int op) {
    constexpr int kinds_of[] = {
#define OP_ROW(name, NAME, definition, kinds) kinds,
#include "ringcomm/types.def"
    };
    return kinds_of[op] & kind;
}

// dst[i] = srcs[0][i] op srcs[1][i] op … op srcs[n-1][i], accumulated in this order, rounded once at the end.
// dst may be exactly one of srcs. `factor`: of premul_sum; avg divides by n * factor, integers
// by its whole part, at least 1. No alignment is assumed.
using ReduceKernel = void (*)(void* dst, const void* const* srcs, int n, size_t count, double factor);

struct Kernels {
    const char* name;
    ReduceKernel reduce[RC_DTYPES][RC_OPS];  // nullptr where the operation is not defined
    void (*copy)(void* dst, const void* src, size_t bytes);
    // Copies with non-temporal stores and ends with a store fence: later stores are ordered after the copy.
    void (*copy_nontemporal)(void* dst, const void* src, size_t bytes);
};

const Kernels& kernels();

inline void copy_block(std::byte* target, const std::byte* source, size_t bytes, bool nontemporal = false) {
    constexpr size_t SHORT = 1 << 10;  // the call of a kernel costs more than it saves
    if (target == source || !bytes) return;
    if (nontemporal) {
        kernels().copy_nontemporal(target, source, bytes);
    } else if (bytes < SHORT) {
        memcpy(target, source, bytes);
    } else {
        kernels().copy(target, source, bytes);
    }
}

// "portable", "avx2", "avx512", "neon", "" for the best; false: not supported by this CPU
bool select_kernels(const char* level);
size_t dtype_bytes(int dtype);
const char* dtype_name(int dtype);
const char* op_name(int op);
bool reducible(int dtype, int op, bool on_gpu = false);

}  // namespace ringcomm
