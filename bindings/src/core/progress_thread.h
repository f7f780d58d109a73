// A thread that makes progress on asynchronous calls while no thread of the program does.
//
// Most programs wait soon after they have started calls, and then make the progress themselves: to wake another thread
// takes longer than a small call. So this one naps before it takes over, and after that looks again, until nothing has
// been open for a while. While the program goes on making calls, the naps grow: each takes the core from the program,
// and the kernel may then give it to another one. Ranks that share a core then lose their turns: on 2 cores of a Zen 5
// (2026-11-28) a halo of 1 KiB takes 4 ranks 9.7 us beside naps of 0.8 ms, and 7.8 us beside those of 26 ms, or none.
// Naps stay short while anything urgent is open, for which peers wait.
#pragma once

#include <algorithm>
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

    // The program has started a call, or stopped waiting. `urgent`: something urgent is open.
    void note_activity(bool urgent = true) {
        activity_.fetch_add(1, std::memory_order_relaxed);
        if (sleeps_ || (urgent && naps_long_)) call();
    }

    // A callback, a poll or a wait relies on this thread: no nap.
    void hurry() {
        hurries_ = true;
        call();
    }

    // Until note_activity(). The mutex need not be held.
    bool sleeps() const { return sleeps_.load(); }

    // Waits until it is this thread's turn: calls are open, and the program is idle. False: stop() was called. Leaves
    // the mutex alone while the program makes calls: to wait for it here would cost each unlock there a system call.
    // `urgent()`: whether anything urgent is open, without the mutex.
    template <class Open, class Idle, class Urgent>
    bool wait_for_turn(std::unique_lock<std::mutex>& lock, Open open, Idle idle, Urgent urgent) {
        auto length = NAP;
        for (int naps = 0; !stopping_;) {
            sleeps_ = naps == NAPS;  // before the look: who changes what is found then sees it, and calls
            if (sleeps_ && open() && idle()) sleeps_ = false;
            lock.unlock();
            uint64_t seen;
            bool called, active;
            do {
                seen = activity_.load(std::memory_order_relaxed);
                naps_long_ = length > LONGEST_URGENT_NAP;  // before the look, as above
                if (urgent()) length = std::min(length, LONGEST_URGENT_NAP);
                called = nap(length);
                naps_long_ = false;
                active = seen != activity_.load(std::memory_order_relaxed);
                naps = called || active ? 0 : naps + 1;
                length = active && !called ? std::min(2 * length, LONGEST_NAP) : NAP;
            } while (!called && naps < NAPS && (active || !idle()));
            lock.lock();
            sleeps_ = false;
            const bool hurries = std::exchange(hurries_, false);
            if (!stopping_ && open() && (hurries || (!active && idle()))) return true;
        }
        return false;
    }

    void stop() {
        stopping_ = true;
        call();
    }
    void join() {
        if (thread_.joinable()) thread_.join();
    }

private:
    static constexpr std::chrono::microseconds NAP{200}, LONGEST_URGENT_NAP{800}, LONGEST_NAP{25'600};
    static constexpr int NAPS = 50;  // without work, before it sleeps until it is woken

    void call() {
        {
            const std::lock_guard lock(nap_mutex_);
            called_ = true;
        }
        wakeup_.notify_one();
    }

    // Returns whether call() ended it.
    bool nap(std::chrono::microseconds length) {
        const auto called = [this] { return called_; };
        std::unique_lock lock(nap_mutex_);
        if (sleeps_) {
            wakeup_.wait(lock, called);
        } else {
            wakeup_.wait_for(lock, length, called);
        }
        return std::exchange(called_, false);
    }

    std::mutex nap_mutex_;
    std::condition_variable wakeup_;
    bool called_ = false;
    std::atomic<uint64_t> activity_{0};
    std::atomic<bool> sleeps_{false}, naps_long_{false};
    bool hurries_ = false, stopping_ = false;
    std::thread thread_;
};

}  // namespace ringcomm
