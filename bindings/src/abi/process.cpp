// The C ABI of a process: its errors, its forks, its kernels, and what its machine takes.
#include <sched.h>

#include "abi/check.h"
#include "core/work.h"
#include "kernels/cpu/kernels.h"
#include "machine/latency.h"
#include "network/world.h"

using namespace ringcomm;

const rc_error* rc_last_error(void) { return &last_error(); }

void rc_set_interrupt(int (*interrupt)(void)) { interrupt_function.store(interrupt); }

void rc_after_fork(void) {
    fork_generation.fetch_add(1);
    networks_after_fork();
    reset_completions();
}

int rc_kernels_select(const char* level) {
    return guarded([&] {
        check_pointer("level", level);
        if (!select_kernels(level)) {
            rejectf("this CPU has no kernels '%s': expected portable, avx2, avx512 or neon, or nothing for the best",
                    level);
        }
    });
}

const char* rc_kernels_name(void) { return kernels().name; }

int rc_dtype_bytes(int dtype) { return dtype >= 0 && dtype < RC_DTYPES ? int(dtype_bytes(dtype)) : 0; }

int rc_reduce(void* dst, const void* const* srcs, int n, uint64_t count, int dtype, int op, double factor) {
    return guarded([&] {
        check_reducible(dtype, op);
        check_range("n", n, 1, MAX_SIZE);
        checked_bytes("dst", dst, count, dtype);
        check_pointer("srcs", srcs);
        for (int i = 0; i < n; ++i) checked_bytes("srcs", srcs[i], count, dtype);
        if (count) kernels().reduce[dtype][op](dst, srcs, n, count, factor);
    });
}

int rc_line_latency(int first, int second, double* ns) {
    return guarded([&] {
        check_range("first", first, 0, CPU_SETSIZE - 1);
        check_range("second", second, 0, CPU_SETSIZE - 1);
        check_pointer("ns", ns);
        *ns = line_latency(first, second);
    });
}

int rc_wake_latency(int waker, int sleeper, uint64_t* ns) {
    return guarded([&] {
        check_range("waker", waker, 0, CPU_SETSIZE - 1);
        check_range("sleeper", sleeper, 0, CPU_SETSIZE - 1);
        check_pointer("ns", ns);
        *ns = wake_latency(waker, sleeper);
    });
}
