#include "engine.h"

#include "round.h"

namespace ringcomm {

namespace {

constexpr uint64_t REFRESH = uint64_t{1} << 32;  // calls

}  // namespace

struct Engine::Queued : Work {
    Queued(const Call& call, int size, double timeout) : call(call), timeout(timeout) {
        if (!call.counts) return;
        counts.assign(call.counts, call.counts + (call.collective == RC_ALL_TO_ALL ? 2 : 1) * size);
        this->call.counts = counts.data();
    }

    Call call;
    double timeout;
    std::vector<uint64_t> counts;
};

void Engine::run(Call& call, double timeout) {
    comm_.ready();
    if (pending_.load() == 0 && executor_.try_lock()) {
        const std::lock_guard executor(executor_, std::adopt_lock);
        if (pending_.load() == 0) return execute(call, timeout);
    }
    const auto work = queue(call, timeout);
    work->wait(comm_, UINT64_MAX);
    work->result();
}

std::shared_ptr<Work> Engine::queue(const Call& call, double timeout) {
    comm_.ready();
    auto work = std::make_shared<Queued>(call, comm_.size, timeout);
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", comm_.rank);
    // First of all, for it may fail.
    if (!worker_.joinable()) worker_ = named_thread("ringcomm-coll", [this] { this->work(); });
    queue_.push_back(work);
    pending_.fetch_add(1);
    arrived_.notify_one();
    return work;
}

void Engine::work() {
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
            comm_.ready();
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

void Engine::execute(Call& call, double timeout) {
    call.epoch = ++epoch_;
    Round round(comm_, call, timeout);
    const uint64_t flight = comm_.flight_start(round.signature(), round.count(), call.epoch, round.start_time());
    const auto finish = [&](int status) {
        comm_.mine().finished.store(call.epoch, std::memory_order_release);
        comm_.flight_end(flight, status);
    };
    if (call.epoch % REFRESH == 0) round.refresh();
    try {
        run_collective(round);
    } catch (Failure& failure) {
        if (failure.error.collective < 0) failure.error.collective = call.collective;
        if (failure.error.epoch == 0) failure.error.epoch = call.epoch;
        // Else it is not finished: what was owed to the peers is still missing.
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

void Engine::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        arrived_.notify_one();
    }
    if (worker_.joinable()) worker_.join();
    // Whoever runs a call on its own thread leaves by itself, because the communicator is closing.
    const std::lock_guard executor(executor_);
}

}  // namespace ringcomm
