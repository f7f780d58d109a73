// How a rank waits: it spins, or yields its core, then sleeps in slices; between slices WaitChecks decides whether the
// wait can still succeed.
//
// Other programs may want the core, too: data loaders, other jobs. Then to spin costs no more than the kernel's share
// allows. To sleep costs little: whoever has slept preempts them, when it is woken, so that the ranks of a job run at
// the same time. But a yield costs a whole slice of theirs, some ms, and this rank's peers wait for it meanwhile. So a
// rank with a core to itself never yields: it spins for some wake-ups, then sleeps. A rank that shares its core with
// other ranks yields to them; once another program has taken a yield, it sleeps at once for a while, unless many ranks
// share each core (machine/placement.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "core/errors.h"
#include "kernels/memory_order.h"

namespace ringcomm {

uint64_t now_ns();
// The same clock at the kernel's last tick, up to TICK_NS ago, in 2.5 ns instead of 20: enough for the flight record,
// which reads it twice a call.
uint64_t tick_ns();
constexpr uint64_t TICK_NS = 10'000'000;
uint64_t deadline_of(uint64_t start, double seconds);

// The checks between slices of sleep.
class WaitChecks {
public:
    // Returns the failure that ends the wait, if any, without effect.
    virtual std::optional<Failure> stop_reason() = 0;
    [[noreturn]] virtual void fail(const Failure& failure) = 0;
    virtual void on_spin_expired() {}  // called once, before it yields or sleeps
    // Gives the core to another rank; false if another program takes it, or would.
    virtual bool yield();
    virtual void on_long_wait() {}  // called once, before the first sleep
    // How long a waiter spins after a sleep, where it may have been woken ahead of its event.
    virtual uint64_t spin_again_ns() const { return 0; }
    virtual uint64_t deadline() const = 0;  // ns

protected:
    ~WaitChecks() = default;
};

// How the threads of a rank sleep, any number of them, each for any event.
class Sleeper {
public:
    // Events after this end sleep(ticket).
    virtual uint32_t announce() = 0;
    // Returns after an event, a signal or `ns`.
    virtual void sleep(uint32_t ticket, uint64_t ns) = 0;
    virtual void retract() = 0;
    virtual void wake() = 0;  // an event

protected:
    ~Sleeper() = default;
};

// How long a waiter spins, or yields, before it sleeps.
struct SpinPolicy {
    uint64_t spin_ns, yield_ns;
};
constexpr SpinPolicy IDLE{0, 0};
// For ranks that need `wake_ns` to wake up. A rank that waits for one that wakes up must not fall asleep itself, or
// both sleep in turn in every call from then on. Where ranks share cores, a spinning rank keeps the core from the rank
// that it waits for, so it only yields: that is cheap while another thread can run, and a wake-up takes an interrupt.
SpinPolicy spin_policy_of(uint64_t wake_ns, bool oversubscribed);

void yield_core();

// What this thread does once it has to wait: Python's module releases the GIL then. nullptr: nothing. Whatever yields
// or sleeps comes here too: with the GIL it would keep the threads from the call that it waits for.
using BeforeWait = void (*)();
extern constinit thread_local BeforeWait before_wait;
inline void about_to_wait() {
    if (before_wait) std::exchange(before_wait, nullptr)();
}
// What a call moves without that: to copy it takes about as long as to release the GIL and to take it again.
constexpr uint64_t LITTLE_BYTES = 16 << 10;

// Locks; another thread may copy a piece of a large message meanwhile.
inline std::unique_lock<std::mutex> lock_or_wait(std::mutex& mutex) {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (lock) return lock;
    about_to_wait();
    lock.lock();
    return lock;
}

// How long a rank that shares its core does not yield after another program has taken it: longer each time it finds
// that one still there.
class YieldPause {
public:
    bool is_over(uint64_t now) const { return now >= end_.load(std::memory_order_relaxed); }
    void start(uint64_t begin, uint64_t end);  // of the yield in which the other program had the core, ns

private:
    std::atomic<uint64_t> end_{0}, length_{0};  // ns
};

// The time that a thread itself has spent waiting. What takes longer than `longest_ns` between two looks at the clock
// is time in which another thread had the core: then the wait does not count.
class WaitClock {
public:
    explicit WaitClock(uint64_t longest_ns) : longest_ns_(longest_ns) {}
    uint64_t waited();
    uint64_t passed() const { return seen_ - begun_; }  // in all, when waited() was called last

private:
    const uint64_t longest_ns_, begun_ = now_ns();
    uint64_t seen_ = begun_, waited_ = 0;
};
constexpr uint64_t MOST_AWAKE_NS = 10'000'000;           // of each spin or yield, whatever else takes the time
constexpr uint64_t POLLS_NS = 10'000, YIELD_NS = 1'000;  // what some polls, or a yield, take at most by themselves
// How long to sleep until the next checks: at most 10 ms.
uint64_t slice_ns(uint64_t deadline);

// Asks as often as between two looks at the clock; a rank that shares its core asks no more in all.
template <class Ready>
bool poll_some(Ready& ready) {
    constexpr int POLLS = 8;
    for (int i = 0; i < POLLS; ++i) {
        if (ready()) return true;
        cpu_relax();
    }
    return false;
}

// Returns when ready() is true. `sleeper` is a Sleeper, or has such functions.
template <class Ready, class SleeperType>
void wait_until(Ready ready, SleeperType&& sleeper, const SpinPolicy& spin_policy, WaitChecks& checks) {
    const auto spin = [&](uint64_t ns) {
        for (WaitClock spinning(POLLS_NS); spinning.waited() < ns && spinning.passed() < MOST_AWAKE_NS;) {
            if (poll_some(ready)) return true;
        }
        return false;
    };
    const bool stays_awake = spin_policy.spin_ns + spin_policy.yield_ns > 0;
    if (stays_awake && poll_some(ready)) return;
    about_to_wait();
    if (stays_awake) {
        if (spin(spin_policy.spin_ns)) return;
        checks.on_spin_expired();
        WaitClock yielding(YIELD_NS);
        while (yielding.waited() < spin_policy.yield_ns && yielding.passed() < MOST_AWAKE_NS) {
            if (ready()) return;
            if (!checks.yield()) break;
        }
    }
    checks.on_long_wait();
    for (;;) {
        const uint32_t ticket = sleeper.announce();
        const bool already = ready();
        if (!already) sleeper.sleep(ticket, slice_ns(checks.deadline()));
        sleeper.retract();
        // Before the checks: the ring of a failure during the spin would not end the next sleep.
        if (already || ready() || spin(checks.spin_again_ns())) return;
        if (const auto failure = checks.stop_reason()) {
            if (ready()) return;  // it arrived just before its sender left
            checks.fail(*failure);
        }
    }
}

}  // namespace ringcomm
