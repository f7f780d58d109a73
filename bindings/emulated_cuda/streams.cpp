#include "bindings/emulated_cuda/streams.h"

#include <pthread.h>
#include <chrono>

#include <csignal>
#include <thread>

namespace ringcomm::emulated {

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void EventRecord::reach() {
    const std::lock_guard lock(mutex_);
    ns_ = now_ns();
    changed_.notify_all();
}

void EventRecord::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ns_; });
}

bool EventRecord::reached() { return ns(); }

int64_t EventRecord::ns() {
    const std::lock_guard lock(mutex_);
    return ns_;
}

void Stream::add(Step step) {
    const std::lock_guard lock(mutex_);
    steps_.push_back(std::move(step));
    try {
        if (added_ == done_) start_thread();
    } catch (...) {
        steps_.pop_back();
        throw;
    }
    ++added_;
}

void Stream::start_thread() {
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const std::shared_ptr<void> restored(nullptr, [&](void*) { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
    std::thread thread([self = shared_from_this()] { self->run(); });
    pthread_setname_np(thread.native_handle(), "emulated stream");
    thread.detach();
}

void Stream::run() {
    std::unique_lock lock(mutex_);
    while (!steps_.empty()) {
        {
            const Step step = std::move(steps_.front());
            steps_.pop_front();
            lock.unlock();
            step();
        }
        lock.lock();
        ++done_;
        changed_.notify_all();
    }
}

// After a step on a thread of the program; others may have been queued meanwhile.
void Stream::finish_one() {
    const std::lock_guard lock(mutex_);
    ++done_;
    if (!steps_.empty()) start_thread();
    changed_.notify_all();
}

bool Stream::idle() {
    const std::lock_guard lock(mutex_);
    return added_ == done_;
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, added = added_] { return done_ >= added; });
}

void Event::record(Stream& stream) {
    const std::lock_guard lock(mutex_);
    point_ = {};
    point_.recorded = true;
    if (stream.run_now([&] { point_.at_once_ns = now_ns(); })) return;
    point_.record = std::make_shared<EventRecord>();
    stream.add([record = point_.record] { record->reach(); });
}

void Event::record_in_capture(std::shared_ptr<Capture> capture, std::vector<size_t> last) {
    const std::lock_guard lock(mutex_);
    point_ = {};
    point_.recorded = true;
    point_.capture = std::move(capture);
    point_.last = std::move(last);
}

Event::Point Event::point() {
    const std::lock_guard lock(mutex_);
    return point_;
}

}  // namespace ringcomm::emulated
