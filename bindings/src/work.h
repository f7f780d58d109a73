// A call that may still run. Whoever completes it and whoever waits for it share it.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm.h"

namespace ringcomm {

// A thread that shows under its name in top and ps.
template <class Body>
std::thread named_thread(const char* name, Body body) {
    std::thread thread(body);
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

class Work {
public:
    virtual ~Work() = default;

    bool done() const { return done_.load(std::memory_order_acquire); }
    void finish(std::optional<Failure> failure);
    // Throws the failure of the call, if it has one. Only after done().
    void result() const;
    // Waits until `deadline` (ns). Past it, the communicator is broken: that stops the call, and then the wait ends.
    virtual void wait(Comm& comm, uint64_t deadline);

    void wait_done();  // when something else is sure to end the call soon
    // Once it is done, `token` comes out of next_done().
    void notify(uint64_t token);

    int source = -1;  // of a receive: who sent

protected:
    std::mutex mutex_;
    std::condition_variable changed_;

private:
    std::atomic<bool> done_{false};
    std::optional<Failure> failure_;
    std::vector<uint64_t> tokens_;  // of those who want to know
};

uint64_t next_done(double timeout);  // seconds; 0 after that
void forget_done();                  // in a forked child, where other threads may have held the lock

}  // namespace ringcomm
