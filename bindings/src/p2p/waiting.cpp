// How PointToPointEngine waits.
#include <algorithm>
#include <utility>

#include "p2p/engine.h"

namespace ringcomm {

namespace {

constexpr uint64_t SENDER_WAKES_NS = 50'000;  // what a sender that sleeps needs to send more

}  // namespace

// One thread's wait: for a request, for room for all buffered sends, or, on the progress thread, while anything is open
// that no thread waits for.
class PointToPointEngine::Waiter final : public WaitChecks {
public:
    Waiter(PointToPointEngine& engine, Request* request, uint64_t deadline, bool flushes = false)
        : engine_(engine), group_(engine.group_), request_(request), deadline_(deadline), flushes_(flushes) {}

    // Checks all open requests: this may be the only waiting thread.
    std::optional<Failure> stop_reason() override {
        const char* what = request_ ? call_name(request_->call()) : "point-to-point";
        if (auto failure = group_.stop_reason(what, &engine_)) return failure;
        const bool late = now_ns() >= deadline_;  // before find_failure(), which names the timeout of a request
        const std::lock_guard lock(engine_.mutex_);
        if (engine_.find_failure(request_)) {
            // A message may have arrived just before its sender left; this many steps read all that has come.
            for (uint64_t packet = 0; packet < PACKETS; ++packet) engine_.progress(Peers::ALL);
            if (auto failure = engine_.find_failure(request_)) return failure;
        }
        if (!late) return {};
        if (flushes_) {
            const char* pattern = "rank %d waited %.3g s in close: its peers have no room for %d sent messages";
            const std::string message = format(pattern, group_.rank, group_.tuning().timeout, engine_.buffered_open_);
            return Failure(RC_TIMEOUT, group_.with_report(message, {}), group_.rank);
        }
        const std::string message = format("rank %d: ", group_.rank) + request_->describe_call() +
                                    " did not complete within the timeout of wait";
        return Failure(RC_TIMEOUT, group_.with_report(message, {}), group_.rank);
    }
    [[noreturn]] void fail(const Failure& failure) override { group_.fail(failure); }
    void on_spin_expired() override { group_.on_spin_expired(); }
    bool yield() override { return group_.yield(); }
    void on_long_wait() override {
        sleeps_ = true;
        if (request_ && request_->sends) buffer();
        if (request_) group_.set_waits_for(request_->transfer.peer);
    }
    // More of a large message may follow.
    uint64_t spin_again_ns() const override { return moved_ ? SENDER_WAKES_NS : 0; }
    uint64_t deadline() const override { return engine_.next_look(deadline_); }

    // While anything moves, a rank that waits for a request goes on: it needs its core.
    bool ready() {
        constexpr int STEPS = 64;  // until the next checks
        moved_ = false;
        for (int step = 0; step < STEPS; ++step) {
            if (request_ && request_->is_done()) return true;
            const auto lock = lock_or_wait(engine_.mutex_);
            if (!request_ && !flushes_ && (engine_.async_open_ == 0 || engine_.waiters_.load() > 0)) return true;
            const bool moved = engine_.progress(sleeps_ ? Peers::ALL : Peers::EXPECTED);
            moved_ |= moved;
            if (flushes_) return engine_.buffered_open_ == 0;
            if (!request_ || !moved) break;
        }
        return request_ && request_->is_done();
    }

    void wait(const SpinPolicy& spin_policy) {
        guarded([&] { wait_until([this] { return ready(); }, engine_.sleeper_, spin_policy, *this); });
    }

    // What wait() does between two sleeps.
    void check() {
        guarded([&] {
            if (const auto failure = stop_reason(); failure && !ready()) fail(*failure);
        });
    }

    std::optional<Failure> failed;  // a wait for no request

private:
    template <class Body>
    void guarded(Body body) {
        try {
            body();
        } catch (const Failure& failure) {
            end(failure);
        } catch (const std::exception& other) {
            const Failure failure(RC_SYSTEM, other.what(), group_.rank);
            group_.store_failure(failure);
            end(failure);
        }
    }

    // Nobody made room while this thread spun. The receiver may be computing, or in a collective that needs this rank.
    void buffer() {
        if (request_->transfer.peer == group_.rank) return;
        const std::lock_guard lock(engine_.mutex_);
        Endpoint& endpoint = engine_.endpoint_of(request_->transfer.peer);
        for (PendingPacket& packet : endpoint.queue) {
            if (packet.request == request_ && engine_.try_buffer(endpoint, packet)) return;
        }
    }

    // The communicator is broken or closed: after this the engine touches no user buffer.
    void end(const Failure& failure) {
        const std::lock_guard lock(engine_.mutex_);
        Failure reported = failure;
        try {
            group_.check_failure();
        } catch (const Failure& first) {
            reported = first;  // a signal ends this thread's wait; the others report the abort that it caused
        }
        failed = reported;
        engine_.fail_all(reported, request_);
        if (request_ && !request_->is_done()) engine_.fail(*request_, failure);
    }

    PointToPointEngine& engine_;
    PeerGroup& group_;
    Request* const request_;
    const uint64_t deadline_;
    const bool flushes_;
    bool moved_ = false;   // anything, at the last look
    bool sleeps_ = false;  // from now on, between looks: what came before a sleep does not end it
};

void PointToPointEngine::wait(Request& request, uint64_t deadline) {
    if (request.is_done()) return;
    waiters_.fetch_add(1);
    Waiter(*this, &request, std::min(deadline, deadline_of(request.start, timeout(request)))).wait(group_.spin_policy);
    group_.flight.clear_waits_for();
    waiters_.fetch_sub(1);
    if (!progress_thread_.sleeps()) return;
    const std::lock_guard lock(mutex_);
    if (async_open_) progress_thread_.note_activity(false);
}

// Looks whether a posted probe has found a message. Who polls all the time never waits, so this checks for dead peers.
void PointToPointEngine::look(Request& request) {
    constexpr uint64_t INTERVAL_NS = 100'000'000;
    if (!request.is_done() && request.start >= next_check_.load()) {
        next_check_.store(request.start + INTERVAL_NS);
        Waiter(*this, &request, UINT64_MAX).check();
    }
    {
        const std::lock_guard lock(mutex_);
        withdraw(request);
    }
    if (!request.is_done() && group_.spin_policy.spin_ns == 0) yield_core();  // to a rank that shares it
}

void PointToPointEngine::advance() {
    const std::lock_guard lock(mutex_);
    if (!stopping_) progress();
}

// Nobody is going to wait for the request.
void PointToPointEngine::detach() {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    progress();
    if (async_open_ && try_start_progress_thread()) progress_thread_.hurry();
}

// Whether a peer may wait for this rank while it makes no calls: for its data, or for the match of a synchronous send.
// What finds room in the ring, or is there already, holds up nobody.
bool PointToPointEngine::needs_thread(const Request& request) {
    if (request.sends) return !is_eager(request);
    const UnexpectedMessage* const found = unexpected_.find(request);
    return !found || found->header.kind != PACKET_EAGER;
}

// Whether the data takes long, or a peer waits for its end.
bool PointToPointEngine::is_urgent(const Request& request) {
    return request.sends ? !is_eager(request) : request.bytes > least_eager_bytes_;
}

void PointToPointEngine::start_progress_thread() {
    progress_thread_.start("ringcomm-p2p", [this] { progress_loop(); });
}

// Returns false if the system refuses a thread: a send that finds no room waits for the next call then.
bool PointToPointEngine::try_start_progress_thread() {
    try {
        start_progress_thread();
    } catch (const std::exception&) {
        return false;
    }
    return true;
}

void PointToPointEngine::progress_loop() {
    std::unique_lock lock(mutex_);
    const auto open = [this] { return async_open_ > 0; };
    const auto idle = [this] { return waiters_.load() == 0; };
    const auto urgent = [this] { return urgent_open_.load() > 0; };
    while (progress_thread_.wait_for_turn(lock, open, idle, urgent)) {
        lock.unlock();
        Waiter(*this, nullptr, UINT64_MAX).wait(IDLE);
        lock.lock();
    }
}

// Keeps the messages of peers coming while this rank waits for something else, such as a collective: its peers may
// have to send them before they can go on.
void PointToPointEngine::drain() {
    constexpr uint64_t MOST_NS = 5'000'000;  // the wait must look at its own event again
    uint64_t end = 0;
    for (WaitClock idle(YIELD_NS); idle.passed() < MOST_NS;) {
        {
            const std::lock_guard lock(mutex_);
            if (stopping_) return;
            try {
                if (progress(Peers::ALL)) end = idle.waited() + SENDER_WAKES_NS;
            } catch (const Failure&) {  // stored: it is of this communicator, and the waiting call of another one
                return;
            }
        }
        if (idle.waited() >= end) return;
        if (group_.spin_policy.yield_ns > 0 && !group_.yield()) return;
    }
}

std::optional<Failure> PointToPointEngine::flush() {
    {
        const std::lock_guard lock(mutex_);
        if (buffered_open_ == 0 || group_.has_failed()) return {};
    }
    Waiter waiter(*this, nullptr, deadline_of(now_ns(), group_.tuning().timeout), true);
    waiter.wait(group_.spin_policy);
    return waiter.failed;
}

}  // namespace ringcomm
