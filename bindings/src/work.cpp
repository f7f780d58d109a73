#include "work.h"

namespace ringcomm {

void Work::finish(std::optional<Failure> failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
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
