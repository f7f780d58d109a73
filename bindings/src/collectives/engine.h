// Runs the collectives of a communicator one at a time, in order: on the caller's thread if nothing is queued, else on
// a worker that starts with the first asynchronous call and sleeps when idle.
#pragma once

#include <deque>
#include <thread>

#include "core/call_record.h"
#include "core/work.h"

namespace ringcomm {

class CollectiveEngine {
public:
    explicit CollectiveEngine(PeerGroup& group) : group_(group) {}
    ~CollectiveEngine() { stop(); }

    void run(CallRecord& call);
    std::shared_ptr<Work> queue(const CallRecord& call);
    void stop();  // after group.start_closing(); queued calls fail

private:
    struct QueuedCall;

    void execute(CallRecord& call);
    void worker_loop();

    PeerGroup& group_;
    uint64_t epoch_ = 0;
    std::mutex executor_;          // held while a collective runs
    std::atomic<int> pending_{0};  // queued or running on the worker: a blocking call must not overtake them
    std::mutex mutex_;             // of the queue
    std::condition_variable arrived_;
    std::deque<std::shared_ptr<QueuedCall>> queue_;
    bool stopping_ = false;
    std::thread worker_;
};

}  // namespace ringcomm
