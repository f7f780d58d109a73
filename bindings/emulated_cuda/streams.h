// Queues of steps, and points in them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ringcomm::emulated {

using Step = std::function<void()>;

int64_t now_ns();

// When a stream reaches one record of an event.
class EventRecord {
public:
    void reach();
    void wait();
    bool reached();
    int64_t ns();  // once it is reached

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int64_t ns_ = 0;
};

class Capture;

// Runs its steps in order, on a thread that ends with the last of them.
class Stream : public std::enable_shared_from_this<Stream> {
public:
    const bool blocking;  // the legacy stream must not be used while this one captures

    explicit Stream(bool blocking = true) : blocking(blocking) {}

    void add(Step step);

    // Runs a short step on the calling thread, if no other is queued.
    template <class Short>
    bool run_now(Short&& step) {
        {
            const std::lock_guard lock(mutex_);
            if (added_ != done_) return false;
            ++added_;
        }
        step();
        finish_one();
        return true;
    }

    bool idle();
    void synchronize();

    // Of capture.cpp.
    std::atomic<bool> capturing = false;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> last;  // the nodes that the next one depends on

private:
    void finish_one();
    void start_thread();
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Step> steps_;
    uint64_t added_ = 0, done_ = 0;
};

class Event {
public:
    explicit Event(bool timed) : timed(timed) {}
    const bool timed;

    void record(Stream& stream);
    void record_in_capture(std::shared_ptr<Capture> capture, std::vector<size_t> last);

    // The latest record.
    struct Point {
        bool recorded = false;
        std::shared_ptr<EventRecord> record;  // null: reached when it was recorded
        int64_t at_once_ns = 0;
        std::shared_ptr<Capture> capture;  // not null: recorded in it, after these nodes
        std::vector<size_t> last;

        bool reached() const { return !record || record->reached(); }
        int64_t ns() const { return record ? record->ns() : at_once_ns; }
    };
    Point point();

private:
    std::mutex mutex_;
    Point point_;
};

}  // namespace ringcomm::emulated
