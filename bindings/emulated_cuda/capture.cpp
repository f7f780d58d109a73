#include "bindings/emulated_cuda/capture.h"

#include <algorithm>
#include <utility>

namespace ringcomm::emulated {
namespace {

struct Captures {
    std::mutex mutex;  // of everything in every capture
    std::vector<std::shared_ptr<Capture>> active;
    std::atomic<size_t> count = 0;  // of the active ones
};

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Captures& captures() { return immortal<Captures>(); }

void join(Capture& capture, const std::shared_ptr<Stream>& stream) {
    capture.streams.push_back(stream);
    stream->capture = capture.origin->capture;
    stream->last.clear();
    stream->capturing = true;
}

// Whether this thread may make no unsafe call because of the capture.
bool forbids(const Capture& capture) {
    const bool own = capture.thread == std::this_thread::get_id() && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool global = capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    return thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED && !capture.invalid && (own || global);
}

}  // namespace

Capture::Capture(std::shared_ptr<Stream> origin, CUstreamCaptureMode mode)
    : id([] {
          static std::atomic<uint64_t> next = 0;
          return ++next;
      }()),
      mode(mode),
      origin(std::move(origin)) {}

bool Capture::all_before(const std::vector<size_t>& last) const {
    std::vector<bool> found(nodes.size());
    std::vector<size_t> left = last;
    while (!left.empty()) {
        const size_t node = left.back();
        left.pop_back();
        if (found[node]) continue;
        found[node] = true;
        left.insert(left.end(), before[node].begin(), before[node].end());
    }
    return std::find(found.begin(), found.end(), false) == found.end();
}

CUresult begin_capture(const std::shared_ptr<Stream>& stream, CUstreamCaptureMode mode) {
    const std::lock_guard lock(captures().mutex);
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    const auto capture = std::make_shared<Capture>(stream, mode);
    captures().active.push_back(capture);
    captures().count = captures().active.size();
    stream->capture = capture;
    join(*capture, stream);
    return CUDA_SUCCESS;
}

CUresult end_capture(Stream& stream, std::shared_ptr<Graph>* graph) {
    const std::lock_guard lock(captures().mutex);
    const std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin.get() != &stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->thread != std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    const bool joined = capture->all_before(stream.last);
    std::erase(captures().active, capture);
    captures().count = captures().active.size();
    capture->ended = true;
    for (const auto& each : std::exchange(capture->streams, {})) {
        each->capturing = false;
        each->capture = nullptr;
        each->last.clear();
    }
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = std::make_shared<Graph>(std::move(capture->nodes));
    return CUDA_SUCCESS;
}

CUstreamCaptureStatus capture_status(Stream& stream, uint64_t* id) {
    if (!stream.capturing) return CU_STREAM_CAPTURE_STATUS_NONE;
    const std::lock_guard lock(captures().mutex);
    if (!stream.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    if (stream.capture->invalid) return CU_STREAM_CAPTURE_STATUS_INVALIDATED;  // which has no number
    *id = stream.capture->id;
    return CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult capture_step(Stream& stream, Step step) {
    const std::lock_guard lock(captures().mutex);
    if (!stream.capture || stream.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream.capture->before.push_back(std::move(stream.last));
    stream.last = {stream.capture->nodes.size()};
    stream.capture->nodes.push_back(std::move(step));
    return CUDA_SUCCESS;
}

CUresult capture_record(Stream& stream, Event& event) {
    const std::lock_guard lock(captures().mutex);
    if (!stream.capture || stream.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event.record_in_capture(stream.capture, stream.last);
    return CUDA_SUCCESS;
}

CUresult capture_wait(const std::shared_ptr<Stream>& stream, const Event::Point& point) {
    const std::lock_guard lock(captures().mutex);
    if (stream->capture && stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!point.recorded) return CUDA_SUCCESS;
    if (!point.capture) {
        if (stream->capture) stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (point.capture->ended) return CUDA_ERROR_CAPTURED_EVENT;
    if (point.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!stream->capture) join(*point.capture, stream);
    if (stream->capture != point.capture) {
        stream->capture->invalid = point.capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->last.insert(stream->last.end(), point.last.begin(), point.last.end());
    return CUDA_SUCCESS;
}

CUresult refuse_capturing(Stream& stream) {
    const std::lock_guard lock(captures().mutex);
    if (!stream.capture) return CUDA_SUCCESS;
    const bool before = std::exchange(stream.capture->invalid, true);
    return before ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_captured(const Event::Point& point) {
    const std::lock_guard lock(captures().mutex);
    point.capture->invalid = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult check_unsafe_call() {
    if (!captures().count) return CUDA_SUCCESS;
    const std::lock_guard lock(captures().mutex);
    bool forbidden = false;
    for (const auto& capture : captures().active)
        if (forbids(*capture)) forbidden = capture->invalid = true;
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult check_legacy_stream(bool invalidate) {
    if (!captures().count) return CUDA_SUCCESS;
    const std::lock_guard lock(captures().mutex);
    bool implicit = false;
    for (const auto& capture : captures().active)
        for (const auto& stream : capture->streams)
            if (stream->blocking && !capture->invalid) {
                implicit = true;
                capture->invalid = invalidate;
            }
    return implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

CUstreamCaptureMode exchange_mode(CUstreamCaptureMode mode) { return std::exchange(thread_mode, mode); }

}  // namespace ringcomm::emulated
