#include "waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ringcomm {

namespace {

constexpr uint64_t SLICE_NS = 100'000'000;

// Not FUTEX_PRIVATE: the word lies in memory shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

uint64_t read_clock(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

uint64_t now_ns() { return read_clock(CLOCK_MONOTONIC); }

uint64_t tick_ns() { return read_clock(CLOCK_MONOTONIC_COARSE); }

void ring_always(Bell& bell) {
    bell.rings.fetch_add(1);
    futex(bell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void ring(Bell& bell, int publisher) {
    if (bell.sleeper.load() == uint32_t(publisher) + 1) ring_always(bell);
}

void ring_any(Bell& bell) {
    if (bell.sleeper.load() != 0) ring_always(bell);
}

void sleep_on(Bell& bell, uint32_t ticket, uint64_t deadline) {
    const uint64_t now = now_ns();
    const uint64_t slice = deadline > now ? std::min(deadline - now, SLICE_NS) : 1;
    const timespec timeout{time_t(slice / 1'000'000'000), long(slice % 1'000'000'000)};
    futex(bell.rings, FUTEX_WAIT, ticket, &timeout);
}

void give_core_away() { sched_yield(); }

}  // namespace ringcomm
