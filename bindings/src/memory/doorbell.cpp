// The futex calls of doorbells.
#include "memory/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ringcomm {

namespace {

// Not FUTEX_PRIVATE: the word lies in memory shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void wake_all(Doorbell& doorbell) {
    doorbell.rings.fetch_add(1);
    futex(doorbell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void ring(Doorbell& doorbell, int publisher) {
    if (doorbell.sleeper.load() == uint32_t(publisher) + 1) wake_all(doorbell);
}

void ring_any(Doorbell& doorbell) {
    if (has_sleeper(doorbell)) wake_all(doorbell);
}

void sleep_on(Doorbell& doorbell, uint32_t ticket, uint64_t ns) {
    about_to_wait();
    const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    futex(doorbell.rings, FUTEX_WAIT, ticket, &timeout);
}

}  // namespace ringcomm
