// Clocks, and the slices of a wait.
#include "core/waiting.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ringcomm {

namespace {

constexpr uint64_t SLICE_NS = 10'000'000;  // torchrun ends the others within 100 ms of a death
constexpr uint64_t SHORTEST_PAUSE_NS = 5'000'000, LONGEST_PAUSE_NS = 160'000'000;  // about 1 slice, and 40
constexpr uint64_t LEAST_WAKE_NS = 25'000, MOST_WAKE_NS = 250'000;

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

constinit thread_local BeforeWait before_wait = nullptr;

void yield_core() {
    about_to_wait();
    sched_yield();
}

bool WaitChecks::yield() {
    yield_core();
    return true;
}

void YieldPause::start(uint64_t begin, uint64_t end) {
    const uint64_t length = length_.load();
    const bool still_there = begin - end_.load() < 4 * length;
    length_.store(still_there ? std::min(2 * length, LONGEST_PAUSE_NS) : SHORTEST_PAUSE_NS);
    end_.store(end + length_.load());
}

SpinPolicy spin_policy_of(uint64_t wake_ns, bool oversubscribed) {
    const uint64_t wake = std::clamp(wake_ns, LEAST_WAKE_NS, MOST_WAKE_NS);
    // Eight wake-ups, at least 200 us, are about what the kernel takes to copy 2 MiB, the least that it copies.
    return oversubscribed ? SpinPolicy{0, 4 * wake} : SpinPolicy{8 * wake, 0};
}

uint64_t WaitClock::waited() {
    const uint64_t now = now_ns();
    waited_ += std::min(now - std::exchange(seen_, now), longest_ns_);
    return waited_;
}

uint64_t slice_ns(uint64_t deadline) {
    const uint64_t now = now_ns();
    return deadline > now ? std::min(deadline - now, SLICE_NS) : 1;
}

}  // namespace ringcomm
