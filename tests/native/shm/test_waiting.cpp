// How a rank waits: what it does before it sleeps, and whom it yields its core to.
#include "core/waiting.h"

#include "world.h"

using namespace ringcomm;

namespace {

constexpr uint64_t MS = 1'000'000;

// A waiter whose event comes in its second sleep.
struct Waiter final : WaitChecks {
    bool to_ranks = true;  // what yield() finds
    int vain_spins = 0, yields = 0, sleeps = 0;

    std::optional<Failure> stop_reason() override { return {}; }
    [[noreturn]] void fail(const Failure&) override { _exit(1); }
    void on_spin_expired() override { ++vain_spins; }
    bool yield() override {
        ++yields;
        return to_ranks;
    }
    uint64_t deadline() const override { return UINT64_MAX; }

    uint32_t announce() const { return 0; }
    void sleep(uint32_t, uint64_t) { ++sleeps; }
    void retract() const {}

    void wait(const SpinPolicy& policy) {
        wait_until([this] { return sleeps == 2; }, *this, policy, *this);
    }
};

void test_core_for_each_rank() {
    const SpinPolicy policy = spin_policy_of(30'000, false);
    CHECK(policy.spin_ns >= 8 * 30'000);
    Waiter waiter;
    waiter.wait(policy);
    CHECK(waiter.vain_spins == 1 && waiter.yields == 0 && waiter.sleeps == 2);
}

void test_shared_core() {
    const SpinPolicy policy = spin_policy_of(30'000, true);
    CHECK(policy.spin_ns == 0);
    Waiter among_ranks;
    among_ranks.wait(policy);
    CHECK(among_ranks.yields > 100 && among_ranks.sleeps == 2);  // each counts as 1 us at most
    Waiter beside_program;
    beside_program.to_ranks = false;
    beside_program.wait(policy);
    CHECK(beside_program.yields == 1 && beside_program.sleeps == 2);
}

void test_progress_thread() {
    Waiter waiter;
    waiter.wait(IDLE);
    CHECK(waiter.vain_spins == 0 && waiter.yields == 0 && waiter.sleeps == 2);
}

void test_pause() {
    YieldPause pause;
    CHECK(pause.is_over(0));
    uint64_t now = 1'000'000 * MS, last = 0;
    // The other program takes every yield.
    for (int i = 0; i < 10; ++i) {
        pause.start(now, now + 4 * MS);
        now += 4 * MS;
        uint64_t length = 0;
        while (!pause.is_over(now + length)) length += MS;
        CHECK(i == 0 ? length == 5 * MS : length == std::min(2 * last, 160 * MS));
        last = length;
        now += length;
    }
    // It has gone, and comes back.
    now += 10 * last;
    pause.start(now, now + 4 * MS);
    CHECK(!pause.is_over(now + 8 * MS) && pause.is_over(now + 9 * MS));
}

}  // namespace

int main() {
    test_core_for_each_rank();
    test_shared_core();
    test_progress_thread();
    test_pause();
    return failures ? 1 : 0;
}
