// The streams of a group of GPUs, and the order of its launches among them.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"
#include "kernels/cuda/call.cuh"

namespace ringcomm {

using cuda::CAPTURED;  // in the number of a call that a graph replays
using cuda::MAX_LAUNCHES;

// Launches run one after the other: on one stream by its order, from stream to stream by an event that is recorded only
// then. A captured launch runs on a stream of its own in the capture, which keeps the order among all streams there.
class GpuStreams {
public:
    explicit GpuStreams(const Driver& driver);  // with the context current, as in all calls
    ~GpuStreams();
    GpuStreams(const GpuStreams&) = delete;

    CUstream own() const { return own_; }  // of calls with async_op
    // The capture that a stream is in, by CUDA's number; 0: none. Throws RC_ARGUMENT for the default stream while
    // another thread captures: CUDA refuses its use then.
    uint64_t capture_of(CUstream stream) const;
    // Whether the stream of the last launch is captured now: then nothing on another stream can wait for that launch.
    // `stream` is not captured.
    bool last_stream_is_captured(CUstream stream) const;

    // Returns the stream for a launch: the caller's, or the own one, which then waits for the caller's.
    // `last_ended`: there is nothing to wait for.
    CUstream begin(CUstream stream, bool async, bool last_ended);
    void end(uint64_t number, CUstream stream);  // `stream`: from begin()
    // The same in a capture. Throws RC_ARGUMENT if another capture with calls of this group is not over.
    CUstream begin_captured(CUstream stream, uint64_t capture);
    void end_captured(uint64_t number, CUstream stream, bool async);

    // Lets later work on `stream` wait for an async launch.
    void wait_for(uint64_t number, CUstream stream) { wait(stream, end_of(number)); }
    CUstream probe() const { return probe_; }  // on which nothing runs: to ask whether the context works

private:
    // Whether an event is recorded after each launch on a stream: on the own one, for those who wait for an async
    // launch; on the per-thread default stream, because no other thread can record one there.
    bool has_event(CUstream stream) const;
    CUevent& end_of(uint64_t number) { return (number & CAPTURED ? captured_ends_ : ends_)[number % MAX_LAUNCHES]; }
    void record(CUevent& event, CUstream stream);  // creates it at its first use
    void wait(CUstream stream, CUevent event) {
        driver_.check(driver_.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
    }

    const Driver& driver_;
    CUstream own_ = nullptr, captured_ = nullptr, probe_ = nullptr;
    CUevent ready_ = nullptr, switched_ = nullptr;
    CUevent ends_[MAX_LAUNCHES]{},
        captured_ends_[MAX_LAUNCHES]{};  // by number, of launches on no stream of the program
    CUstream last_ = nullptr;            // of the last launch that was not captured
    uint64_t last_number_ = 0;
};

}  // namespace ringcomm
