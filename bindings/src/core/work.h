// An asynchronous call, shared by the thread that completes it and its waiters.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/peer_group.h"

namespace ringcomm {

[[noreturn]] void throw_not_started(const char* name, const std::system_error& error);

// A thread that top and ps show by name.
template <class Body>
std::thread named_thread(const char* name, Body body) {
    try {
        std::thread thread(body);
        pthread_setname_np(thread.native_handle(), name);
        return thread;
    } catch (const std::system_error& error) {
        throw_not_started(name, error);
    }
}

constexpr rc_message NO_MESSAGE{-1, 0, RC_ANY_TAG, 0, 0};

class Work {
public:
    virtual ~Work() = default;

    bool done() const { return done_.load(std::memory_order_acquire); }
    void finish(std::unique_ptr<Failure> failure = nullptr);
    // The call, which is done, starts again.
    void restart();
    // Throws the failure of the call, if it has one. Only after done().
    void result();
    // The program will not ask for the result: from now on `group` keeps a failure that it has not seen.
    void drop(PeerGroup& group);
    bool has_unseen_failure() const { return done() && failure_ && !failure_seen_.load(); }
    // Waits until `deadline` (ns). Then it breaks the communicator, which stops the call and ends the wait.
    virtual void wait(PeerGroup& group, uint64_t deadline);

    // Of a message on a GPU: waits only until its launches have been made; and lets a stream wait for their end.
    virtual void wait_launched(PeerGroup& group, uint64_t deadline) { wait(group, deadline); }
    virtual bool launched() const { return done(); }
    virtual void order(void* /*stream*/) {}

    void wait_done();  // when the call is certain to end soon
    // When the call is done, next_done() returns `token`.
    void notify(uint64_t token);
    // The program polls for the end of the call. Not after close().
    virtual void advance() {}
    // The program will be told of the end of the call, or has dropped it: from now on it goes on by itself.
    virtual void detach() { advance(); }

    // Withdraws a receive that no message has matched; returns whether it did.
    virtual bool cancel() { return false; }

    rc_message message = NO_MESSAGE;  // of a receive

protected:
    // Lets a waiting thread run the call, with the lock released; returns whether it did anything.
    virtual bool run_here(std::unique_lock<std::mutex>& /*lock*/) { return false; }
    void wake();  // its waiters: they may run it now

    std::mutex mutex_;
    std::condition_variable changed_;

private:
    void keep_in(PeerGroup& group);  // the failure

    std::atomic<bool> done_{false};
    std::unique_ptr<Failure> failure_;  // some KiB, which most calls need not allocate
    std::atomic<bool> failure_seen_{false};
    PeerGroup* dropped_in_ = nullptr;  // while the call may still run
    std::vector<uint64_t> tokens_;     // for next_done()
};

uint64_t next_done(double timeout);  // seconds; 0 after that
void reset_completions();            // in a forked child, where a thread of the parent may have held the lock

}  // namespace ringcomm
