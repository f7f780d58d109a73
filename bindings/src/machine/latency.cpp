// The measurements: a cache line there and back, and a wake-up.
#include "machine/latency.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "core/waiting.h"
#include "core/work.h"
#include "kernels/memory_order.h"
#include "memory/doorbell.h"

namespace ringcomm {

namespace {

constexpr uint64_t MOST_WAIT_NS = 100'000'000;

struct alignas(LINE) PaddedFlag {
    Flag value{0};
};

void await(const Flag& flag, uint64_t value) {
    for (int i = 0; observe(flag) < value; ++i) {
        cpu_relax();
        if (i % 1000 == 999) yield_core();  // there may be a single core
    }
}

// Moves the calling thread to a core, where permitted.
void move_to(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

// On threads of their own, because the caller may be bound to one core, and stays where it is. `first` has to end by
// itself after `release`, if the second thread does not start.
template <class First, class Second, class Release>
void run_both(First first, Second second, Release release) {
    std::thread before = named_thread("ringcomm-probe", first), behind;
    try {
        behind = named_thread("ringcomm-probe", second);
    } catch (...) {
        release();
        before.join();
        throw;
    }
    behind.join();
    before.join();
}

}  // namespace

double line_latency(int first, int second) {
    constexpr uint64_t BATCHES = 9, ROUNDS = 1000;
    PaddedFlag line;
    std::array<double, BATCHES> times;
    const auto answer = [&] {
        move_to(second);
        for (uint64_t round = 0; round < BATCHES * ROUNDS; ++round) {
            await(line.value, 2 * round + 1);
            line.value.store(2 * round + 2, std::memory_order_release);
        }
    };
    const auto ask = [&] {
        move_to(first);
        uint64_t round = 0;
        for (double& time : times) {
            const uint64_t start = now_ns();
            for (const uint64_t end = round + ROUNDS; round < end; ++round) {
                line.value.store(2 * round + 1, std::memory_order_release);
                await(line.value, 2 * round + 2);
            }
            time = double(now_ns() - start) / ROUNDS;
        }
    };
    run_both(answer, ask, [&] { line.value.store(UINT64_MAX, std::memory_order_release); });
    std::nth_element(times.begin(), times.begin() + BATCHES / 2, times.end());
    return times[BATCHES / 2];
}

uint64_t wake_latency(int waker, int sleeper) {
    constexpr uint64_t ROUNDS = 9, ASLEEP_NS = 100'000;  // until the sleeper has left its core
    PaddedFlag asleep, awake;
    Doorbell doorbell{};
    std::array<uint64_t, ROUNDS> woken, times;
    std::atomic<bool> released{false};
    const auto sleep = [&] {
        move_to(sleeper);
        for (uint64_t round = 1; round <= ROUNDS && !released.load(); ++round) {
            const uint32_t ticket = doorbell.rings.load();
            asleep.value.store(round, std::memory_order_release);
            while (doorbell.rings.load() == ticket) sleep_on(doorbell, ticket, MOST_WAIT_NS);
            woken[round - 1] = now_ns();
            awake.value.store(round, std::memory_order_release);
        }
    };
    const auto wake = [&] {
        move_to(waker);
        for (uint64_t round = 1; round <= ROUNDS; ++round) {
            await(asleep.value, round);
            std::this_thread::sleep_for(std::chrono::nanoseconds(ASLEEP_NS));
            const uint64_t start = now_ns();
            wake_all(doorbell);
            await(awake.value, round);
            times[round - 1] = woken[round - 1] - start;
        }
    };
    run_both(sleep, wake, [&] {
        released.store(true);
        wake_all(doorbell);
    });
    std::nth_element(times.begin(), times.begin() + ROUNDS / 2, times.end());
    return times[ROUNDS / 2];
}

}  // namespace ringcomm
