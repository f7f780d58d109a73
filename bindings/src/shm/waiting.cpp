// Doorbells, and the steps in which a wait becomes a sleep.
#include "shm/waiting.h"

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

void wake_all(Doorbell& doorbell) {
    doorbell.rings.fetch_add(1);
    futex(doorbell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void ring(Doorbell& doorbell, int publisher) {
    if (doorbell.sleeper.load() == uint32_t(publisher) + 1) wake_all(doorbell);
}

void ring_any(Doorbell& doorbell) {
    if (doorbell.sleeper.load() != 0) wake_all(doorbell);
}

void sleep_on(Doorbell& doorbell, uint32_t ticket, uint64_t deadline) {
    const uint64_t now = now_ns();
    const uint64_t slice = deadline > now ? std::min(deadline - now, SLICE_NS) : 1;
    const timespec timeout{time_t(slice / 1'000'000'000), long(slice % 1'000'000'000)};
    futex(doorbell.rings, FUTEX_WAIT, ticket, &timeout);
}

void yield_core() { sched_yield(); }

}  // namespace ringcomm
