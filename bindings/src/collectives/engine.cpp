// CollectiveEngine: the collectives of a communicator, one at a time.
#include "collectives/engine.h"

#include "core/collectives.h"

namespace ringcomm {

struct CollectiveEngine::QueuedCall : Work {
    QueuedCall(const CallRecord& call, int size) : call(call) {
        if (!call.counts) return;
        counts.assign(call.counts, call.counts + (collectives[call.collective].exchanges() ? 2 : 1) * size);
        this->call.counts = counts.data();
    }

    CallRecord call;
    std::vector<uint64_t> counts;
};

void CollectiveEngine::run(CallRecord& call) {
    group_.ensure_ready();
    if (pending_.load() == 0 && executor_.try_lock()) {
        const std::lock_guard executor(executor_, std::adopt_lock);
        if (pending_.load() == 0) return execute(call);
    }
    const auto work = queue(call);
    work->wait(group_, UINT64_MAX);
    work->result();
}

std::shared_ptr<Work> CollectiveEngine::queue(const CallRecord& call) {
    group_.ensure_ready();
    auto work = std::make_shared<QueuedCall>(call, group_.size);
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", group_.rank);
    // Before anything else: it may throw.
    if (!worker_.joinable()) worker_ = named_thread("ringcomm-coll", [this] { worker_loop(); });
    queue_.push_back(work);
    pending_.fetch_add(1);
    arrived_.notify_one();
    return work;
}

void CollectiveEngine::worker_loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        arrived_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const auto next = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        std::optional<Failure> failure;
        try {
            const std::lock_guard executor(executor_);
            group_.ensure_ready();
            execute(next->call);
        } catch (const Failure& thrown) {
            failure = thrown;
        } catch (const std::exception& other) {
            failure = Failure(RC_SYSTEM, other.what(), group_.rank);
        }
        pending_.fetch_sub(1);
        next->finish(failure);
        lock.lock();
    }
}

void CollectiveEngine::execute(CallRecord& call) {
    call.epoch = ++epoch_;
    call.start = tick_ns();
    if (call.timeout < 0) call.timeout = group_.tuning().timeout;
    call.signature = signature_of(call, group_.size);
    const uint64_t flight = group_.flight.start(call.signature.word, call.signature.count, call.epoch, call.start);
    try {
        group_.run_collective(call);
    } catch (Failure& failure) {
        if (failure.error.collective < 0) failure.error.collective = call.collective;
        if (failure.error.epoch == 0) failure.error.epoch = call.epoch;
        group_.flight.end(flight, failure.error.code);
        throw;
    } catch (const std::exception& other) {
        group_.fail(Failure(RC_SYSTEM, other.what(), group_.rank));
    }
    group_.flight.end(flight, RC_OK);
}

void CollectiveEngine::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        arrived_.notify_one();
    }
    if (worker_.joinable()) worker_.join();
    // A call on a user thread ends by itself, because the communicator is closing.
    const std::lock_guard executor(executor_);
}

}  // namespace ringcomm
