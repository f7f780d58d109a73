// CollectiveQueue: the collectives of a communicator, one at a time.
#include "collectives/queue.h"

#include <algorithm>

#include "core/collectives.h"
#include "core/running_collective.h"

namespace ringcomm {

// Destroyed once the executor is free again.
class CollectiveQueue::WakeHeadOnExit {
public:
    // `unawaited`: how many calls no thread waits for yet.
    explicit WakeHeadOnExit(CollectiveQueue& queue, int unawaited = 0) : queue_(queue), unawaited_(unawaited) {}
    ~WakeHeadOnExit();
    WakeHeadOnExit(const WakeHeadOnExit&) = delete;

private:
    CollectiveQueue& queue_;
    const int unawaited_;
};

struct CollectiveQueue::QueuedCall : Work {
    QueuedCall(CollectiveQueue& queue, const CallRecord& call) : call(call), queue(queue) {
        if (!call.counts) return;
        const int blocks = (collectives[call.collective].exchanges() ? 2 : 1) * queue.group_.size;
        counts.assign(call.counts, call.counts + blocks);
        this->call.counts = counts.data();
    }
    void wait(PeerGroup& group, uint64_t deadline) override {
        if (deadline != UINT64_MAX) {
            detach();  // this thread must not run a call, which may take longer
        } else if (std::unique_lock free(queue.executor_, std::try_to_lock); free) {
            queue.run_until(*this, std::move(free));
        }
        if (!done()) Work::wait(group, deadline);
    }
    bool run_here(std::unique_lock<std::mutex>& lock) override {
        std::unique_lock free(queue.executor_, std::try_to_lock);
        if (!free) return false;  // who holds it wakes this thread afterwards
        lock.unlock();
        queue.run_until(*this, std::move(free));
        lock.lock();
        return true;
    }
    void advance() override { queue.run_arrived(); }
    void detach() override { queue.detach(*this); }
    using Work::wake;

    CallRecord call;
    CollectiveQueue& queue;
    std::vector<uint64_t> counts;
    bool detached = false;
};

CollectiveQueue::WakeHeadOnExit::~WakeHeadOnExit() {
    if (queue_.pending_.load() <= unawaited_) return;
    if (const auto first = queue_.first()) first->wake();
}

void CollectiveQueue::run(CallRecord& call) {
    group_.ensure_ready();
    if (pending_.load() == 0) {
        const WakeHeadOnExit wakes(*this);
        const std::unique_lock executor(executor_, std::try_to_lock);
        if (executor && pending_.load() == 0) return execute(call, false);
    }
    const auto work = enqueue(call, true);
    work->wait(group_, UINT64_MAX);
    work->result();
}

std::shared_ptr<Work> CollectiveQueue::enqueue(const CallRecord& call, bool awaited) {
    group_.ensure_ready();
    auto work = std::make_shared<QueuedCall>(*this, call);
    const WakeHeadOnExit wakes(*this, 1);
    std::unique_lock executor(executor_, std::defer_lock);
    // A signal handler may run inside a call, whose thread holds the executor.
    const bool is_free = pending_.load() == 0 && !group_.interrupted_here() && executor.try_lock();
    const std::lock_guard lock(mutex_);
    const bool starts = is_free && queue_.empty() && group_.can_start(call);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", group_.rank);
    if (!starts && !awaited) start_progress_thread();  // before anything else: it may throw
    const bool needed = needs_thread();
    queue_.push_back(work);
    pending_.fetch_add(1);
    if (starts) start(work->call);
    if (!needed && needs_thread()) progress_thread_.note_activity();  // the nap begins with the first
    return work;
}

std::shared_ptr<CollectiveQueue::QueuedCall> CollectiveQueue::first() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() ? nullptr : queue_.front();
}

void CollectiveQueue::start(CallRecord& call) {
    begin(call);
    group_.start_collective(call);
    call.started = true;
}

void CollectiveQueue::start_first() {
    if (pending_.load() == 0) return;
    const std::lock_guard lock(mutex_);
    if (queue_.empty() || group_.closing() || group_.has_failed()) return;
    CallRecord& call = queue_.front()->call;
    if (!call.started && group_.can_start(call)) start(call);
}

bool CollectiveQueue::run_next() {
    std::shared_ptr<QueuedCall> next;
    {
        const std::lock_guard lock(mutex_);
        if (queue_.empty()) return false;
        next = std::move(queue_.front());
        queue_.pop_front();
    }
    std::unique_ptr<Failure> failure;
    try {
        if (!next->call.started) group_.ensure_ready();
        if (next->call.elements(group_.size) * next->call.item > LITTLE_BYTES) about_to_wait();
        execute(next->call, true);
    } catch (const Failure& thrown) {
        failure = std::make_unique<Failure>(thrown);
    } catch (const std::exception& other) {
        failure = std::make_unique<Failure>(RC_SYSTEM, other.what(), group_.rank);
    }
    pending_.fetch_sub(1);
    next->finish(std::move(failure));
    return true;
}

void CollectiveQueue::run_until(const Work& call, std::unique_lock<std::mutex> executor) {
    const WakeHeadOnExit wakes(*this);
    const auto held = std::move(executor);  // freed first
    while (!call.done() && run_next()) continue;
    start_first();
}

void CollectiveQueue::run_arrived() {
    constexpr uint64_t PATIENCE_NS = 20'000'000;
    if (group_.interrupted_here()) return;
    std::shared_ptr<QueuedCall> next;
    {
        const WakeHeadOnExit wakes(*this);
        const std::unique_lock executor(executor_, std::try_to_lock);
        if (!executor) return;
        while ((next = first()) && next->call.started && group_.has_arrived(next->call)) run_next();
        start_first();
    }
    // The thread also finds the failure of a call that takes long.
    if (next && (!next->call.started || tick_ns() > next->call.start + PATIENCE_NS)) detach(*next);
}

void CollectiveQueue::detach(QueuedCall& call) {
    const std::lock_guard lock(mutex_);
    if (call.done() || stopping_) return;
    start_progress_thread();
    call.detached = true;
    progress_thread_.hurry();
}

bool CollectiveQueue::needs_thread() const {
    if (queue_.size() != 1) return !queue_.empty();
    return !queue_.front()->call.started || queue_.front()->detached;
}

void CollectiveQueue::start_progress_thread() {
    progress_thread_.start("ringcomm-coll", [this] { progress_loop(); });
}

void CollectiveQueue::progress_loop() {
    std::unique_lock lock(mutex_);
    const auto open = [this] { return needs_thread(); };
    const auto idle = [] { return true; }, urgent = idle;
    while (progress_thread_.wait_for_turn(lock, open, idle, urgent)) {
        lock.unlock();
        {
            const WakeHeadOnExit wakes(*this);
            const std::lock_guard executor(executor_);
            while (run_next()) continue;
        }
        lock.lock();
    }
}

void CollectiveQueue::execute(CallRecord& call, bool queued) {
    if (Trace* trace = group_.trace(); trace && !parts_.load()) return execute_traced(call, *trace, queued);
    run_recorded(call);
}

void CollectiveQueue::execute_traced(CallRecord& call, Trace& trace, bool queued) {
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
                      uint32_t(group_.last_path.load(std::memory_order_relaxed)),
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

void CollectiveQueue::begin(CallRecord& call) {
    call.epoch = ++epoch_;
    call.start = tick_ns();
    if (call.timeout < 0) call.timeout = group_.tuning().timeout;
    call.signature = signature_of(call, group_.size);
    group_.flight.count_bytes(call.elements(group_.size) * call.item);
    flight_ = call.flight = group_.flight.start(call.signature.word, call.signature.count, call.epoch, call.start);
}

void CollectiveQueue::run_recorded(CallRecord& call) {
    if (!call.started) begin(call);
    try {
        group_.run_collective(call);
    } catch (Failure& failure) {
        name_call(failure, call);
        group_.flight.end(call.flight, failure.error.code);
        throw;
    } catch (const std::exception& other) {
        group_.fail(Failure(RC_SYSTEM, other.what(), group_.rank));
    }
    const bool kept = group_.returned_failure.exists(), throws = kept && !call.is_part();
    if (call.deferred_mismatch) *call.deferred_mismatch = kept;
    group_.flight.end(call.flight, throws ? RC_MISMATCH : RC_OK);
    if (throws) group_.returned_failure.check();
}

void CollectiveQueue::confirm(double timeout) {
    group_.ensure_ready();
    const WakeHeadOnExit wakes(*this);
    const std::lock_guard executor(executor_);
    group_.flight.resume(flight_);
    try {
        group_.confirm(epoch_, timeout < 0 ? group_.tuning().timeout : timeout);
    } catch (const Failure& failure) {
        group_.flight.end(flight_, failure.error.code);
        throw;
    }
    group_.flight.end(flight_, RC_OK);
}

void CollectiveQueue::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        progress_thread_.stop();
    }
    progress_thread_.join();
    // A call on a user thread ends by itself, because the communicator is closing, and those in the queue at once.
    const std::lock_guard executor(executor_);
    while (run_next()) continue;
}

}  // namespace ringcomm
