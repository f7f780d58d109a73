// Work: an asynchronous call.
#include "core/work.h"

#include <chrono>
#include <deque>

namespace ringcomm {

namespace {

// The tokens of completed works of the process.
struct CompletionQueue {
    std::mutex mutex;
    std::condition_variable arrived;
    std::deque<uint64_t> tokens;

    void push(uint64_t token) {
        const std::lock_guard lock(mutex);
        tokens.push_back(token);
        arrived.notify_one();
    }
};

CompletionQueue* completions = new CompletionQueue;  // never freed: threads may wait there until the process ends

}  // namespace

void throw_not_started(const char* name, const std::system_error& error) {
    throw Failure(RC_SYSTEM, format("cannot start the thread '%s' (%s): raise the limit on threads and processes "
                                    "(RLIMIT_NPROC, pids.max of the control group) or memory (RLIMIT_AS)",
                                    name, error.code().message().c_str()));
}

uint64_t next_done(double timeout) {
    CompletionQueue& done = *completions;
    std::unique_lock lock(done.mutex);
    done.arrived.wait_for(lock, std::chrono::duration<double>(timeout), [&] { return !done.tokens.empty(); });
    if (done.tokens.empty()) return 0;
    const uint64_t token = done.tokens.front();
    done.tokens.pop_front();
    return token;
}

void reset_completions() { completions = new CompletionQueue; }

void Work::notify(uint64_t token) {
    const std::lock_guard lock(mutex_);
    if (done())
        completions->push(token);
    else
        tokens_.push_back(token);
}

void Work::finish(std::unique_ptr<Failure> failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    if (failure_ && dropped_in_) keep_in(*dropped_in_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
    for (const uint64_t token : tokens_) completions->push(token);
}

void Work::restart() {
    failure_.reset();
    failure_seen_.store(false);
    tokens_.clear();
    message = NO_MESSAGE;
    done_.store(false, std::memory_order_relaxed);
}

void Work::result() {
    if (!failure_) return;
    failure_seen_.store(true);
    throw *failure_;
}

void Work::drop(PeerGroup& group) {
    const std::lock_guard lock(mutex_);
    dropped_in_ = &group;
    if (has_unseen_failure()) keep_in(group);
}

void Work::keep_in(PeerGroup& group) {
    const int code = failure_->error.code;
    if (code == RC_MISMATCH || code == RC_ARGUMENT) group.dropped_failure.keep(*failure_);  // others break the group
    failure_seen_.store(true);
}

void Work::wake() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
}

void Work::wait_done() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done(); });
}

void Work::wait(PeerGroup& group, uint64_t deadline) {
    std::optional<Failure> interrupted;
    bool late = false;
    about_to_wait();
    std::unique_lock lock(mutex_);
    while (!done()) {
        // With a deadline it must not run the call, which may take longer.
        if (deadline == UINT64_MAX && run_here(lock)) continue;
        // In slices, for Python's signals; the thread that runs the call makes all other checks.
        changed_.wait_for(lock, std::chrono::milliseconds(50));
        if (done()) break;
        lock.unlock();
        try {
            if (!interrupted) group.check_interrupt("wait");
        } catch (const Failure& failure) {
            interrupted = failure;  // it broke the communicator; the call stops and releases the buffers
        }
        if (!late && now_ns() >= deadline) {
            late = true;
            const std::string text =
                format("rank %d: the call did not complete within the timeout of wait", group.rank);
            group.store_failure(Failure(RC_TIMEOUT, group.with_report(text, {}), group.rank));
        }
        lock.lock();
    }
    if (interrupted) throw *interrupted;
}

}  // namespace ringcomm
