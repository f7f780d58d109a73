// Waits for launches, by the program and by the thread that watches them.
#include <time.h>

#include <algorithm>

#include "cuda/group.h"

namespace ringcomm {
namespace {

constexpr uint64_t SHORTEST_PAUSE_NS = 20'000, LONGEST_PAUSE_NS = 2'000'000;  // between polls for the end of a launch
// Between two polls of the watching thread if nobody waits for an end, so that it takes a thousandth of a core.
constexpr uint64_t POLL_NS = 100'000'000;
constexpr uint64_t IDLE_NS = 1'000'000'000;  // without a launch, before it sleeps until it is woken

uint64_t longer(uint64_t ns) { return std::clamp(ns * 3 / 2, SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS); }

void pause(uint64_t ns) {
    const timespec time{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    nanosleep(&time, nullptr);
}

// GPU completions wake no thread: poll.
class Backoff {
public:
    uint32_t announce() const { return 0; }
    void sleep(uint32_t, uint64_t most) {
        pause(std::min(ns_, most));
        ns_ = longer(ns_);
    }
    void retract() const {}

private:
    uint64_t ns_ = SHORTEST_PAUSE_NS;
};

}  // namespace

class GpuGroup::WaitForEnd final : public WaitChecks {
public:
    WaitForEnd(GpuGroup& gpus, PeerGroup& host, uint64_t number, double timeout)
        : gpus_(gpus),
          host_(host),
          number_(number),
          timeout_(timeout),
          deadline_(timeout < 0 ? UINT64_MAX : deadline_of(now_ns(), timeout)) {}

    std::optional<Failure> stop_reason() override {
        gpus_.check_gpu(host_);
        if (auto failure = host_.stop_reason("a call on a GPU")) return failure;
        if (auto failure = gpus_.find_lost_peer(host_, loss_)) return failure;
        if (now_ns() < deadline_) return {};
        const LaunchInfo launch = gpus_.info(number_);
        const std::string call = launch.number ? describe(launch.signature) : "a call";
        return Failure(RC_TIMEOUT,
                       format("rank %d waited %.3g s for ", host_.rank, timeout_) + call + " on " + gpus_.device_,
                       host_.rank);
    }
    [[noreturn]] void fail(const Failure& failure) override { host_.fail(failure); }
    bool yield() override { return host_.yield(); }
    uint64_t deadline() const override { return deadline_; }

private:
    GpuGroup& gpus_;
    PeerGroup& host_;
    const uint64_t number_;
    const double timeout_;
    const uint64_t deadline_;
    PeerLoss loss_;
};

void GpuGroup::wait(PeerGroup& host, uint64_t number, double timeout) {
    WaitForEnd checks(*this, host, number, timeout);
    try {
        wait_until([&] { return ended(number); }, Backoff(), host.spin_policy, checks);
    } catch (const Failure&) {
        abort();
        while (!ended(number)) {  // the kernel sees the abort, or has not begun: the program queued work before it
            pause(SHORTEST_PAUSE_NS);
            check_gpu(host);
        }
        throw;
    }
}

void GpuGroup::await(PeerGroup& host, uint64_t number) {
    if (!ended(number)) wait(host, number, -1);
}

void GpuGroup::await_room(PeerGroup& host) {
    const uint64_t next = launched_.load() + 2;
    if (next > MAX_LAUNCHES) await(host, next - MAX_LAUNCHES);
}

bool GpuGroup::busy() const {
    return !ended(launched_.load()) || load_acquire(&control_->replay_started) != load_acquire(&control_->replay_ended);
}

void GpuGroup::begin_watching() { driver_.check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent"); }

bool GpuGroup::poll_launches(PeerGroup& host) {
    if (busy()) {
        idle_ns_ = 0;
        if (!load_acquire(&control_->abort)) end_hopeless_launches(host);
    } else {
        loss_ = {};
        if (!idle_ns_) idle_ns_ = now_ns();
    }
    // A kernel can fail before its launch has returned.
    const uint64_t number = failed() ? control_->failure.call : 0;
    if (number && (number & CAPTURED || number <= launched_.load()) && !reported_.exchange(true)) return true;
    const uint64_t due = notify_.load();
    if (!due || !ended(due) || !notify_.exchange(0)) return false;
    pause_ns_ = 0;
    return true;
}

void GpuGroup::sleep() {
    std::unique_lock lock(watching_);
    pause_ns_ = notify_.load() ? longer(pause_ns_) : 0;
    if (stopped_.load()) return;
    if (replays_.load() || !idle_ns_ || now_ns() - idle_ns_ < IDLE_NS) {
        changed_.wait_for(lock, std::chrono::nanoseconds(pause_ns_ ? pause_ns_ : POLL_NS));
        return;
    }
    asleep_.store(true);
    if (!busy() && !notify_.load() && !stopped_.load()) changed_.wait(lock);  // else launched meanwhile
    asleep_.store(false);
    idle_ns_ = 0;
}

void GpuGroup::wake() {
    const std::lock_guard lock(watching_);
    changed_.notify_all();
}

void GpuGroup::notify(uint64_t number) {
    uint64_t due = notify_.load();
    while ((!due || number < due) && !notify_.compare_exchange_weak(due, number)) {
    }
    wake();
}

void GpuGroup::stop() {
    stopped_.store(true);
    wake();
}

}  // namespace ringcomm
