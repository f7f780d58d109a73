// How a rank waits: it spins, yields its core, then sleeps in slices; between slices WaitChecks decides whether the
// wait can still succeed.
#pragma once

#include <optional>

#include "core/errors.h"
#include "shm/layout.h"

namespace ringcomm {

uint64_t now_ns();
// The same clock at the kernel's last tick, up to TICK_NS ago, in 2.5 ns instead of 20: enough for the flight record,
// which reads it twice a call.
uint64_t tick_ns();
constexpr uint64_t TICK_NS = 10'000'000;

// Wake the owner of the doorbell: if it sleeps for rank `publisher`, if it sleeps, always.
void ring(Doorbell& doorbell, int publisher);
void ring_any(Doorbell& doorbell);
void wake_all(Doorbell& doorbell);

// One thread sleeps, for one publisher, which alone wakes it.
struct OneSleeper {
    int publisher;
    void announce(Doorbell& doorbell) const {
        doorbell.sleeper.exchange(publisher + 1);
    }  // sequentially consistent: see publish()
    void retract(Doorbell& doorbell) const { doorbell.sleeper.store(0, std::memory_order_relaxed); }
};

// Any number of threads sleep, each for any event.
struct AnySleeper {
    void announce(Doorbell& doorbell) const { doorbell.sleeper.fetch_add(1); }
    void retract(Doorbell& doorbell) const { doorbell.sleeper.fetch_sub(1); }
};

// The checks between slices of sleep.
class WaitChecks {
public:
    // Returns the failure that ends the wait, if any, without effect.
    virtual std::optional<Failure> stop_reason() = 0;
    [[noreturn]] virtual void fail(const Failure& failure) = 0;
    virtual void on_long_wait() {}          // called once
    virtual uint64_t deadline() const = 0;  // ns

protected:
    ~WaitChecks() = default;
};

struct SpinPolicy {
    int spins;
    int yields;
};
// Where ranks share cores, a spinning rank keeps the core from the rank that it waits for, so it yields early; a yield
// is cheap while another thread can run, a sleep costs a wake-up by interrupt. For four ranks on two cores of a Zen 5,
// 5 spins took 2.2 us for 4 bytes, 0 took 2.7 and 20 took 2.5.
constexpr SpinPolicy DEDICATED{4000, 8}, OVERSUBSCRIBED{5, 200}, IDLE{0, 0};

// Sleeps until the doorbell rings after `ticket`, a signal arrives, the deadline passes or a slice (100 ms) ends.
void sleep_on(Doorbell& doorbell, uint32_t ticket, uint64_t deadline);
void yield_core();

// Returns when ready() is true.
template <class Ready, class Sleeper>
void wait_until(Ready ready, Doorbell& doorbell, Sleeper sleeper, const SpinPolicy& spin_policy, WaitChecks& checks) {
    for (int i = 0; i < spin_policy.spins; ++i) {
        if (ready()) return;
        cpu_relax();
    }
    for (int i = 0; i < spin_policy.yields; ++i) {
        if (ready()) return;
        yield_core();
    }
    checks.on_long_wait();
    for (;;) {
        const uint32_t ticket = doorbell.rings.load(std::memory_order_acquire);
        sleeper.announce(doorbell);
        const bool already = ready();
        if (!already) sleep_on(doorbell, ticket, checks.deadline());
        sleeper.retract(doorbell);
        if (already || ready()) return;
        if (const auto failure = checks.stop_reason()) {
            if (ready()) return;  // it arrived just before its sender left
            checks.fail(*failure);
        }
    }
}

}  // namespace ringcomm
