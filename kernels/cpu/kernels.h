// The CPU's inner loops, behind one table per instruction set. Everything above calls through `kernels()`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ringcomm.h"

namespace ringcomm {

// dst[i] = srcs[0][i] op srcs[1][i] op … op srcs[n-1][i], accumulated in this order, rounded once at the end.
// dst may be exactly one of srcs. `factor`: of premul_sum; avg divides by n * factor. No alignment is assumed.
using ReduceKernel = void (*)(void* dst, const void* const* srcs, int n, size_t count, double factor);

struct Kernels {
    const char* name;
    ReduceKernel reduce[RC_DTYPES][RC_OPS];  // nullptr where the operation makes no sense
    // Copies with non-temporal stores and ends with a store fence: what follows is ordered after the copied bytes.
    void (*copy_stream)(void* dst, const void* src, size_t bytes);
};

const Kernels& kernels();
bool select_kernels(const char* level);  // "portable", "avx2", "avx512", "" for the best; false: this CPU has it not
size_t dtype_bytes(int dtype);
const char* dtype_name(int dtype);
const char* op_name(int op);

}  // namespace ringcomm
