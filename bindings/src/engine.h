// Runs the collectives of a communicator one at a time, in their order: on the caller's thread if nothing is queued,
// else on a worker that starts with the first asynchronous call and sleeps when idle.
#pragma once

#include <deque>
#include <thread>

#include "work.h"

namespace ringcomm {

class Engine {
public:
    explicit Engine(Comm& comm) : comm_(comm) {}
    ~Engine() { stop(); }

    void run(Call& call, double timeout);
    std::shared_ptr<Work> queue(const Call& call, double timeout);
    void stop();  // after comm.start_closing(): what is still queued fails

private:
    struct Queued;

    void execute(Call& call, double timeout);
    void work();

    Comm& comm_;
    uint64_t epoch_ = 0;
    std::mutex executor_;          // held while a collective runs
    std::atomic<int> pending_{0};  // queued and not done: a blocking call may not overtake them
    std::mutex mutex_;             // of the queue
    std::condition_variable arrived_;
    std::deque<std::shared_ptr<Queued>> queue_;
    bool stopping_ = false;
    std::thread worker_;
};

}  // namespace ringcomm
