#include "work.h"

#include <chrono>
#include <deque>

namespace ringcomm {

namespace {

// The tokens of works that are done, of the whole process.
struct Done {
    std::mutex mutex;
    std::condition_variable arrived;
    std::deque<uint64_t> tokens;

    void push(uint64_t token) {
        const std::lock_guard lock(mutex);
        tokens.push_back(token);
        arrived.notify_one();
    }
};

Done* everything_done = new Done;  // never freed: threads may wait there until the process ends

}  // namespace

uint64_t next_done(double timeout) {
    Done& done = *everything_done;
    std::unique_lock lock(done.mutex);
    done.arrived.wait_for(lock, std::chrono::duration<double>(timeout), [&] { return !done.tokens.empty(); });
    if (done.tokens.empty()) return 0;
    const uint64_t token = done.tokens.front();
    done.tokens.pop_front();
    return token;
}

void forget_done() { everything_done = new Done; }

void Work::notify(uint64_t token) {
    const std::lock_guard lock(mutex_);
    if (done())
        everything_done->push(token);
    else
        tokens_.push_back(token);
}

void Work::finish(std::optional<Failure> failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
    for (const uint64_t token : tokens_) everything_done->push(token);
}

void Work::result() const {
    if (failure_) throw *failure_;
}

void Work::wait_done() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done(); });
}

void Work::wait(Comm& comm, uint64_t deadline) {
    std::optional<Failure> interrupted;
    bool late = false;
    std::unique_lock lock(mutex_);
    while (!done()) {
        // In slices, for Python's signals; the thread that runs the call does all other checks.
        changed_.wait_for(lock, std::chrono::milliseconds(50));
        if (done()) break;
        lock.unlock();
        try {
            if (!interrupted) comm.check_interrupt("wait");
        } catch (const Failure& failure) {
            interrupted = failure;  // which broke the communicator; the call will notice and let go of the buffers
        }
        if (!late && now_ns() >= deadline) {
            late = true;
            const std::string text = format("rank %d: the call was not done when the time to wait was over", comm.rank);
            comm.store_failure(Failure(RC_TIMEOUT, comm.with_report(text, {}), comm.rank));
        }
        lock.lock();
    }
    if (interrupted) throw *interrupted;
}

}  // namespace ringcomm
