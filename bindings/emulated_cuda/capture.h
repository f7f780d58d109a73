// Captures: while a stream captures, its steps become the nodes of a graph. Another stream joins the capture when it
// waits for an event recorded in it. A replay runs the nodes one after the other, in the order of the calls.
#pragma once

#include <thread>

#include "bindings/emulated_cuda/handles.h"
#include "bindings/emulated_cuda/streams.h"

namespace ringcomm::emulated {

struct Graph {
    std::vector<Step> nodes;
};

struct GraphExec {
    std::vector<Step> nodes;
    std::mutex running;  // one replay at a time
};

class Capture {
public:
    Capture(std::shared_ptr<Stream> origin, CUstreamCaptureMode mode);

    const uint64_t id;
    const CUstreamCaptureMode mode;
    const std::thread::id thread = std::this_thread::get_id();
    const std::shared_ptr<Stream> origin;

    bool ended = false, invalid = false;
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<Step> nodes;
    std::vector<std::vector<size_t>> before;  // of each node: its dependencies

    bool all_before(const std::vector<size_t>& last) const;  // whether every node is among these or before them
};

CUresult begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode);
CUresult end_capture(Stream& stream, std::shared_ptr<Graph>* graph);
CUstreamCaptureStatus capture_status(Stream& stream, uint64_t* id);

// Of a stream that captures.
CUresult capture_step(Stream& stream, Step step);
CUresult capture_record(Stream& stream, Event& event);

// A stream waits for an event where one of the two captures.
CUresult capture_wait(const std::shared_ptr<Stream>& stream, const Event::Point& point);

// A query of what only captures: invalidates the capture.
CUresult refuse_capturing(Stream& stream);
CUresult refuse_captured(const Event::Point& point);

// Whether this thread may make a call now that no capture can contain. If not, the captures that forbid it end.
CUresult check_unsafe_call();
CUresult check_legacy_stream(bool invalidate);
CUstreamCaptureMode exchange_mode(CUstreamCaptureMode mode);

}  // namespace ringcomm::emulated
