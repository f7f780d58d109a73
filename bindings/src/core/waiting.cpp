// Clocks, and the slices of a wait.
#include "core/waiting.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cmath>

namespace ringcomm {

namespace {

constexpr uint64_t SLICE_NS = 100'000'000;

uint64_t read_clock(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

uint64_t now_ns() { return read_clock(CLOCK_MONOTONIC); }

uint64_t tick_ns() { return read_clock(CLOCK_MONOTONIC_COARSE); }

uint64_t deadline_of(uint64_t start, double seconds) {
    // Beyond a century means never, so that the product cannot overflow. `start` may be a tick old, so add one.
    return seconds > 3e9 ? UINT64_MAX : start + TICK_NS + uint64_t(std::fmax(seconds, 0) * 1e9);
}

void yield_core() { sched_yield(); }

uint64_t slice_ns(uint64_t deadline) {
    const uint64_t now = now_ns();
    return deadline > now ? std::min(deadline - now, SLICE_NS) : 1;
}

}  // namespace ringcomm
