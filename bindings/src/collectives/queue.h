// Runs the collectives of a communicator one at a time, in order.
//
// A thread that makes a call, or waits for one, runs it and those queued before. The first one in the queue has begun
// if it is small: its peers have all that they need of this rank, and who polls for its end completes it once they have
// come. A progress thread runs others for which no thread waits yet.
#pragma once

#include <deque>

#include "core/call_record.h"
#include "core/progress_thread.h"

namespace ringcomm {

class CollectiveQueue {
public:
    explicit CollectiveQueue(PeerGroup& group) : group_(group) {}
    ~CollectiveQueue() { stop(); }

    void run(CallRecord& call);
    // `awaited`: this thread waits for it next.
    std::shared_ptr<Work> enqueue(const CallRecord& call, bool awaited = false);
    // Waits until all ranks have made their last call; throws RC_MISMATCH if they have called different things.
    void confirm(double timeout);
    void stop();  // after group.start_closing(); queued calls fail
    // While they are parts of a call, collectives are not entered into the trace.
    void trace_parts(bool parts) { parts_.store(parts); }

private:
    struct QueuedCall;

    class WakeHeadOnExit;  // the thread that waits for the first call of the queue: it may run it now

    // The executor is held.
    bool run_next();  // false: nothing is queued
    void start_first();
    void start(CallRecord& call);

    void run_until(const Work& call, std::unique_lock<std::mutex> executor);
    void run_arrived();
    void detach(QueuedCall& call);
    std::shared_ptr<QueuedCall> first();
    bool needs_thread() const;     // the mutex is held
    void start_progress_thread();  // it too
    void begin(CallRecord& call);
    void execute(CallRecord& call, bool queued);
    void execute_traced(CallRecord& call, Trace& trace, bool queued);
    void run_recorded(CallRecord& call);
    void progress_loop();

    PeerGroup& group_;
    uint64_t epoch_ = 0, flight_ = 0;  // of the last call: its number, and that in the flight record
    std::atomic<bool> parts_{false};
    std::mutex executor_;          // held while a collective runs
    std::atomic<int> pending_{0};  // queued, or taken from the queue and running: a call must not overtake them
    std::mutex mutex_;             // of the queue
    std::deque<std::shared_ptr<QueuedCall>> queue_;
    bool stopping_ = false;
    ProgressThread progress_thread_;
};

}  // namespace ringcomm
