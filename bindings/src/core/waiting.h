// How a rank waits: it spins, yields its core, then sleeps in slices; between slices WaitChecks decides whether the
// wait can still succeed.
#pragma once

#include <cstdint>
#include <optional>

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
    virtual void on_long_wait() {}          // called once
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

struct SpinPolicy {
    int spins;
    int yields;
};
// Where ranks share cores, a spinning rank keeps the core from the rank that it waits for, so it yields early; a yield
// is cheap while another thread can run, a sleep costs a wake-up by interrupt. For four ranks on two cores of a Zen 5,
// 5 spins took 2.2 us for 4 bytes, 0 took 2.7 and 20 took 2.5.
constexpr SpinPolicy DEDICATED{4000, 8}, OVERSUBSCRIBED{5, 200}, IDLE{0, 0};

void yield_core();
// How long to sleep until the next checks: at most 100 ms.
uint64_t slice_ns(uint64_t deadline);

// Returns when ready() is true. `sleeper` is a Sleeper, or has such functions.
template <class Ready, class SleeperType>
void wait_until(Ready ready, SleeperType&& sleeper, const SpinPolicy& spin_policy, WaitChecks& checks) {
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
        const uint32_t ticket = sleeper.announce();
        const bool already = ready();
        if (!already) sleeper.sleep(ticket, slice_ns(checks.deadline()));
        sleeper.retract();
        if (already || ready()) return;
        if (const auto failure = checks.stop_reason()) {
            if (ready()) return;  // it arrived just before its sender left
            checks.fail(*failure);
        }
    }
}

}  // namespace ringcomm
