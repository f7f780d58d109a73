// CollectiveEngine: the collectives of a communicator, one at a time.
#include "collectives/engine.h"

#include <algorithm>

#include "core/collectives.h"

namespace ringcomm {

struct CollectiveEngine::QueuedCall : Work {
    QueuedCall(CollectiveEngine& engine, const CallRecord& call) : call(call), engine(engine) {
        if (!call.counts) return;
        const int blocks = (collectives[call.collective].exchanges() ? 2 : 1) * engine.group_.size;
        counts.assign(call.counts, call.counts + blocks);
        this->call.counts = counts.data();
    }
    void wait(PeerGroup& group, uint64_t deadline) override {
        if (deadline != UINT64_MAX) {
            advance();  // this thread must not run a call, which may take longer
        } else if (engine.executor_.try_lock()) {
            const std::lock_guard executor(engine.executor_, std::adopt_lock);
            while (!done() && engine.run_next()) continue;
        }
        Work::wait(group, deadline);
    }
    void advance() override {
        const std::lock_guard lock(engine.mutex_);
        engine.progress_thread_.hurry();
    }

    CallRecord call;
    CollectiveEngine& engine;
    std::vector<uint64_t> counts;
};

void CollectiveEngine::run(CallRecord& call) {
    group_.ensure_ready();
    if (pending_.load() == 0 && executor_.try_lock()) {
        const std::lock_guard executor(executor_, std::adopt_lock);
        if (pending_.load() == 0) return execute(call, false);
    }
    const auto work = queue(call);
    work->wait(group_, UINT64_MAX);
    work->result();
}

std::shared_ptr<Work> CollectiveEngine::queue(const CallRecord& call) {
    group_.ensure_ready();
    auto work = std::make_shared<QueuedCall>(*this, call);
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", group_.rank);
    // Before anything else: it may throw.
    progress_thread_.start("ringcomm-coll", [this] { progress_loop(); });
    queue_.push_back(work);
    pending_.fetch_add(1);
    if (queue_.size() == 1) progress_thread_.note_activity();  // the nap begins with the first
    return work;
}

// The executor is held: what was taken from the queue first runs first.
bool CollectiveEngine::run_next() {
    std::shared_ptr<QueuedCall> next;
    {
        const std::lock_guard lock(mutex_);
        if (queue_.empty()) return false;
        next = std::move(queue_.front());
        queue_.pop_front();
    }
    std::optional<Failure> failure;
    try {
        group_.ensure_ready();
        execute(next->call, true);
    } catch (const Failure& thrown) {
        failure = thrown;
    } catch (const std::exception& other) {
        failure = Failure(RC_SYSTEM, other.what(), group_.rank);
    }
    pending_.fetch_sub(1);
    next->finish(failure);
    return true;
}

void CollectiveEngine::progress_loop() {
    const auto run_all = [this] {
        const std::lock_guard executor(executor_);
        while (run_next()) continue;
    };
    std::unique_lock lock(mutex_);
    const auto open = [this] { return !queue_.empty(); };
    const auto idle = [] { return true; };
    while (progress_thread_.wait_for_turn(lock, open, idle)) {
        lock.unlock();
        run_all();
        lock.lock();
    }
    lock.unlock();
    run_all();  // they fail: the communicator is closing
}

void CollectiveEngine::execute(CallRecord& call, bool queued) {
    if (Trace* trace = group_.trace(); trace && !parts_.load()) return execute_traced(call, *trace, queued);
    run_recorded(call);
}

void CollectiveEngine::execute_traced(CallRecord& call, Trace& trace, bool queued) {
    TraceEntry entry{};
    Waits waits;
    group_.waits = &waits;
    entry.start = ticks();
    const auto add = [&](int status) {
        entry.end = ticks();
        group_.waits = nullptr;
        entry.signature = call.signature.word;
        entry.call = {call.elements(group_.size),
                      call.epoch,
                      waits.total,
                      group_.last_path.load(std::memory_order_relaxed),
                      int16_t(waits.late),
                      int8_t(status),
                      uint8_t(queued ? TRACE_QUEUED : 0),
                      uint32_t(std::min<uint64_t>(waits.longest / 256, UINT32_MAX))};
        trace.add(entry);
    };
    try {
        run_recorded(call);
    } catch (const Failure& failure) {
        add(failure.error.code);
        throw;
    }
    add(RC_OK);
}

void CollectiveEngine::run_recorded(CallRecord& call) {
    call.epoch = ++epoch_;
    call.start = tick_ns();
    if (call.timeout < 0) call.timeout = group_.tuning().timeout;
    call.signature = signature_of(call, group_.size);
    group_.flight.count_bytes(call.elements(group_.size) * call.item);
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
        progress_thread_.stop();
    }
    progress_thread_.join();
    // A call on a user thread ends by itself, because the communicator is closing.
    const std::lock_guard executor(executor_);
}

}  // namespace ringcomm
