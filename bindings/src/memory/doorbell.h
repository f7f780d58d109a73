// Doorbells: how a rank sleeps on a futex word in shared memory, and how its peers wake it.
#pragma once

#include "core/waiting.h"
#include "memory/layout.h"

namespace ringcomm {

// Wake the owner of the doorbell: if it sleeps for rank `publisher`, if it sleeps, always.
void ring(Doorbell& doorbell, int publisher);
void ring_any(Doorbell& doorbell);
inline bool has_sleeper(const Doorbell& doorbell) { return doorbell.sleeper.load() != 0; }
void wake_all(Doorbell& doorbell);
// Sleeps until the doorbell rings after `ticket`, a signal arrives or `ns` have passed.
void sleep_on(Doorbell& doorbell, uint32_t ticket, uint64_t ns);

// One thread sleeps, for one publisher, which alone wakes it.
struct OneSleeper {
    Doorbell& doorbell;
    int publisher;

    uint32_t announce() const {
        const uint32_t ticket = doorbell.rings.load(std::memory_order_acquire);
        doorbell.sleeper.exchange(publisher + 1);  // sequentially consistent: see publish()
        return ticket;
    }
    void sleep(uint32_t ticket, uint64_t ns) const { sleep_on(doorbell, ticket, ns); }
    void retract() const { doorbell.sleeper.store(0, std::memory_order_relaxed); }
};

class AnySleeper final : public Sleeper {
public:
    explicit AnySleeper(Doorbell& doorbell) : doorbell_(doorbell) {}

    uint32_t announce() override {
        const uint32_t ticket = doorbell_.rings.load(std::memory_order_acquire);
        doorbell_.sleeper.fetch_add(1);
        return ticket;
    }
    void sleep(uint32_t ticket, uint64_t ns) override { sleep_on(doorbell_, ticket, ns); }
    void retract() override { doorbell_.sleeper.fetch_sub(1); }
    void wake() override { ring_any(doorbell_); }

private:
    Doorbell& doorbell_;
};

}  // namespace ringcomm
