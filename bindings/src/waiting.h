// How a rank waits: it spins, gives its core away, then sleeps in slices; between slices somebody looks whether the
// awaited can still come.
#pragma once

#include <optional>

#include "errors.h"
#include "shared.h"

namespace ringcomm {

uint64_t now_ns();
// The same clock as of the kernel's last tick, up to TICK_NS ago, for an eighth of the 20 ns: enough for the flight
// record, which two times a call looks at it.
uint64_t tick_ns();
constexpr uint64_t TICK_NS = 10'000'000;

// Rank `publisher` has published something that the owner of `bell` may sleep for.
void ring(Bell& bell, int publisher);
void ring_any(Bell& bell);
void ring_always(Bell& bell);

// One thread sleeps here, for one publisher: only that one wakes it.
struct OneSleeper {
    int publisher;
    void announce(Bell& bell) const { bell.sleeper.exchange(publisher + 1); }  // sequentially consistent: see publish()
    void retract(Bell& bell) const { bell.sleeper.store(0, std::memory_order_relaxed); }
};

// Any number of threads sleep here, each for anything.
struct AnySleeper {
    void announce(Bell& bell) const { bell.sleeper.fetch_add(1); }
    void retract(Bell& bell) const { bell.sleeper.fetch_sub(1); }
};

// What is looked at between slices of sleep.
class Watch {
public:
    // The failure that ends the wait, if there is one; it has no effect yet.
    virtual std::optional<Failure> look() = 0;
    [[noreturn]] virtual void fail(const Failure& failure) = 0;
    virtual void late() {}                  // told once, when the wait gets long
    virtual uint64_t deadline() const = 0;  // ns

protected:
    ~Watch() = default;
};

struct Patience {
    int spins;
    int yields;
};
// Where ranks share cores, spinning keeps the core from the very rank that is waited for, so a rank yields early; a
// yield is cheap while somebody else can run, a sleep costs a wake-up by interrupt. 5 spins were better than 0 and 20
// for four ranks on two cores of a Zen 5: 2.2 us against 2.7 and 2.5 for 4 bytes.
constexpr Patience DEDICATED{4000, 8}, OVERSUBSCRIBED{5, 200}, IDLE{0, 0};

// Sleeps until the bell rings after `ticket`, a signal comes, the deadline passes or a slice (100 ms) is over.
void sleep_on(Bell& bell, uint32_t ticket, uint64_t deadline);
void give_core_away();

// Returns when ready() is true.
template <class Ready, class Sleeper>
void wait_until(Ready ready, Bell& bell, Sleeper sleeper, const Patience& patience, Watch& watch) {
    for (int i = 0; i < patience.spins; ++i) {
        if (ready()) return;
        cpu_relax();
    }
    for (int i = 0; i < patience.yields; ++i) {
        if (ready()) return;
        give_core_away();
    }
    watch.late();
    for (;;) {
        const uint32_t ticket = bell.rings.load(std::memory_order_acquire);
        sleeper.announce(bell);
        const bool already = ready();
        if (!already) sleep_on(bell, ticket, watch.deadline());
        sleeper.retract(bell);
        if (already || ready()) return;
        if (const auto failure = watch.look()) {
            if (ready()) return;  // it came just before its sender went
            watch.fail(*failure);
        }
    }
}

}  // namespace ringcomm
