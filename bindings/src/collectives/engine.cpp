// CollectiveEngine: the collectives of a communicator, one at a time.
#include "collectives/engine.h"

#include "collectives/collective_op.h"
#include "core/collectives.h"

namespace ringcomm {

namespace {

constexpr uint64_t REFRESH = uint64_t{1} << 32;  // calls

}  // namespace

struct CollectiveEngine::QueuedCall : Work {
    QueuedCall(const CallRecord& call, int size, double timeout) : call(call), timeout(timeout) {
        if (!call.counts) return;
        counts.assign(call.counts, call.counts + (collectives[call.collective].exchanges() ? 2 : 1) * size);
        this->call.counts = counts.data();
    }

    CallRecord call;
    double timeout;
    std::vector<uint64_t> counts;
};

void CollectiveEngine::run(CallRecord& call, double timeout) {
    comm_.ensure_ready();
    if (pending_.load() == 0 && executor_.try_lock()) {
        const std::lock_guard executor(executor_, std::adopt_lock);
        if (pending_.load() == 0) return execute(call, timeout);
    }
    const auto work = queue(call, timeout);
    work->wait(comm_, UINT64_MAX);
    work->result();
}

std::shared_ptr<Work> CollectiveEngine::queue(const CallRecord& call, double timeout) {
    comm_.ensure_ready();
    auto work = std::make_shared<QueuedCall>(call, comm_.size, timeout);
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", comm_.rank);
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
            comm_.ensure_ready();
            execute(next->call, next->timeout);
        } catch (const Failure& thrown) {
            failure = thrown;
        } catch (const std::exception& other) {
            failure = Failure(RC_SYSTEM, other.what(), comm_.rank);
        }
        pending_.fetch_sub(1);
        next->finish(failure);
        lock.lock();
    }
}

void CollectiveEngine::execute(CallRecord& call, double timeout) {
    call.epoch = ++epoch_;
    CollectiveOp op(comm_, call, timeout);
    const uint64_t flight = comm_.flight_start(op.signature(), op.count(), call.epoch, op.start_time());
    const auto finish = [&](int status) {
        comm_.mine().finished.store(call.epoch, std::memory_order_release);
        comm_.flight_end(flight, status);
    };
    if (call.epoch % REFRESH == 0) op.refresh_flags();
    try {
        run_collective(op);
    } catch (Failure& failure) {
        if (failure.error.collective < 0) failure.error.collective = call.collective;
        if (failure.error.epoch == 0) failure.error.epoch = call.epoch;
        // Otherwise the call is not finished: this rank still owes data to its peers.
        const bool agreed = failure.error.code == RC_MISMATCH || failure.error.code == RC_ARGUMENT;
        if (agreed)
            finish(failure.error.code);
        else
            comm_.flight_end(flight, failure.error.code);
        throw;
    } catch (const std::exception& other) {
        comm_.fail(Failure(RC_SYSTEM, other.what(), comm_.rank));
    }
    finish(RC_OK);
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
