// A thread that makes progress on asynchronous calls while no thread of the program does.
//
// Most programs wait soon after they have started calls, and then make the progress themselves: to wake another thread
// takes longer than a small call. So this one naps before it takes over, and after that looks again, until nothing has
// been open for a while.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "core/work.h"

namespace ringcomm {

// The mutex of the owner is held in all calls but join().
class ProgressThread {
public:
    // Starts `loop` on a thread, once. Throws Failure.
    template <class Loop>
    void start(const char* name, Loop loop) {
        if (!thread_.joinable()) thread_ = named_thread(name, loop);
    }

    // The program has started a call, or stopped waiting.
    void note_activity() {
        ++activity_;
        if (sleeps_) wakeup_.notify_one();
    }

    // A callback, a poll or a wait relies on this thread: no nap.
    void hurry() {
        hurries_ = true;
        wakeup_.notify_one();
    }

    // Until note_activity(). The mutex need not be held.
    bool sleeps() const { return sleeps_.load(); }

    // Waits until it is this thread's turn: calls are open, and the program is idle. False: stop() was called.
    template <class Open, class Idle>
    bool wait_for_turn(std::unique_lock<std::mutex>& lock, Open open, Idle idle) {
        for (int naps = 0; !stopping_; ++naps) {
            if (naps == NAPS) {
                sleeps_ = true;
                wakeup_.wait(lock, [&] { return stopping_ || hurries_ || (open() && idle()); });
                sleeps_ = false;
                naps = 0;
            }
            const uint64_t seen = activity_;
            wakeup_.wait_for(lock, NAP, [this] { return stopping_ || hurries_; });
            const bool hurries = std::exchange(hurries_, false);
            if (!stopping_ && open() && (hurries || (seen == activity_ && idle()))) return true;
            if (seen != activity_) naps = 0;
        }
        return false;
    }

    void stop() {
        stopping_ = true;
        wakeup_.notify_one();
    }
    void join() {
        if (thread_.joinable()) thread_.join();
    }

private:
    static constexpr std::chrono::microseconds NAP{200};  // to wake up takes 2 us of the core
    static constexpr int NAPS = 50;                       // in vain, before it sleeps until it is woken

    std::condition_variable wakeup_;
    uint64_t activity_ = 0;
    std::atomic<bool> sleeps_{false};
    bool hurries_ = false, stopping_ = false;
    std::thread thread_;
};

}  // namespace ringcomm
