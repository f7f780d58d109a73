// The driver's functions on streams, events, captures and graphs.
#include "bindings/emulated_cuda/capture.h"
#include "bindings/emulated_cuda/handles.h"
#include "bindings/emulated_cuda/launch.h"

#include <cstring>

namespace ringcomm::emulated {
namespace {

auto& streams() { return immortal<Handles<CUstream, Stream>>(); }
auto& events() { return immortal<Handles<CUevent, Event>>(); }
auto& graphs() { return immortal<Handles<CUgraph, Graph>>(); }
auto& executables() { return immortal<Handles<CUgraphExec, GraphExec>>(); }

bool is_legacy(CUstream handle) { return !handle || handle == STREAM_LEGACY; }

// Calls `body` with the stream of a handle.
template <class Body>
CUresult with_stream(CUstream handle, Body body) {
    return entered(CONTEXT, [&]() -> CUresult {
        if (is_legacy(handle))
            if (const CUresult implicit = check_legacy_stream(true)) return implicit;
        const auto stream = find_stream(handle);
        return stream ? body(stream) : CUDA_ERROR_INVALID_HANDLE;
    });
}

template <class Body>
CUresult with_event(CUevent handle, Body body) {
    return entered(CONTEXT, [&]() -> CUresult {
        const auto event = events().find(handle);
        return event ? body(*event) : CUDA_ERROR_INVALID_HANDLE;
    });
}

// Copies are short, so an idle stream needs no thread for them.
template <class Copy>
CUresult copy(CUstream handle, Copy copy) {
    return with_stream(handle, [&](const auto& stream) {
        if (!stream->capturing && stream->run_now(copy)) return CUDA_SUCCESS;
        return add_step(*stream, copy);
    });
}

}  // namespace

std::shared_ptr<Stream> find_stream(CUstream handle) {
    if (is_legacy(handle)) {
        static const auto& legacy = *new auto(std::make_shared<Stream>());
        return legacy;
    }
    if (handle == STREAM_PER_THREAD) {
        thread_local const auto own = std::make_shared<Stream>();
        return own;
    }
    return streams().find(handle);
}

CUresult add_step(Stream& stream, Step step) {
    if (stream.capturing) return capture_step(stream, std::move(step));
    stream.add(std::move(step));
    return CUDA_SUCCESS;
}

}  // namespace ringcomm::emulated

using namespace ringcomm::emulated;

RC_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return entered(CONTEXT, [&] {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
        return CUDA_SUCCESS;
    });
}

// The streams of other threads that are per thread are not among them.
RC_EXPORT CUresult cuCtxSynchronize() {
    return entered(CONTEXT, [&] {
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        auto all = streams().all();
        for (const CUstream own : {STREAM_LEGACY, STREAM_PER_THREAD}) all.push_back(find_stream(own));
        CUresult refused = CUDA_SUCCESS;
        for (const auto& stream : all)
            if (stream->capturing) refused = refuse_capturing(*stream);
        if (refused) return refused;
        for (const auto& stream : all) stream->synchronize();
        return settings.failed.load();
    });
}

RC_EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
    return entered(CONTEXT, [&] {
        if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        *stream = streams().add(std::make_shared<Stream>(flags != CU_STREAM_NON_BLOCKING));
        return CUDA_SUCCESS;
    });
}

// What is queued still runs.
RC_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    return entered(CONTEXT, [&] {
        const auto stream = streams().remove(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        refuse_capturing(*stream);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    return with_stream(handle, [&](const auto& stream) {
        if (stream->capturing) return refuse_capturing(*stream);
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        stream->synchronize();
        return settings.failed.load();
    });
}

RC_EXPORT CUresult cuStreamQuery(CUstream handle) {
    ++calls.stream_queries;
    return with_stream(handle, [&](const auto& stream) {
        if (stream->capturing) return refuse_capturing(*stream);
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

RC_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    return with_stream(handle, [&](const auto& stream) {
        return with_event(event, [&](Event& event) {
            const Event::Point point = event.point();
            if (stream->capturing || point.capture) return capture_wait(stream, point);
            if (!point.reached()) stream->add([record = point.record] { record->wait(); });
            return CUDA_SUCCESS;
        });
    });
}

RC_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return with_stream(handle, [&](const auto& stream) {
        return add_step(*stream, [=] {
            in_host_function = true;
            function(data);
            in_host_function = false;
        });
    });
}

RC_EXPORT CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    if (bytes && (!target || !source)) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, [=] { memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes); });
}

RC_EXPORT CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream) {
    if (bytes && !target) return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, [=] { memset(reinterpret_cast<void*>(target), value, bytes); });
}

RC_EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
    return entered(CONTEXT, [&] {
        if (!event || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        *event = events().add(std::make_shared<Event>(!(flags & CU_EVENT_DISABLE_TIMING)));
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    return entered(CONTEXT, [&] { return events().remove(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}

RC_EXPORT CUresult cuEventRecord(CUevent event, CUstream handle) {
    ++calls.event_records;
    return with_stream(handle, [&](const auto& stream) {
        return with_event(event, [&](Event& event) {
            if (stream->capturing) return capture_record(*stream, event);
            event.record(*stream);
            return CUDA_SUCCESS;
        });
    });
}

RC_EXPORT CUresult cuEventQuery(CUevent event) {
    return with_event(event, [&](Event& event) {
        const Event::Point point = event.point();
        if (point.capture) return refuse_captured(point);
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        return point.reached() ? settings.failed.load() : CUDA_ERROR_NOT_READY;
    });
}

RC_EXPORT CUresult cuEventSynchronize(CUevent event) {
    return with_event(event, [&](Event& event) {
        const Event::Point point = event.point();
        if (point.capture) return refuse_captured(point);
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        if (point.record) point.record->wait();
        return settings.failed.load();
    });
}

RC_EXPORT CUresult cuEventElapsedTime(float* ms, CUevent begin, CUevent end) {
    return with_event(begin, [&](Event& begin) {
        return with_event(end, [&](Event& end) {
            const Event::Point from = begin.point(), to = end.point();
            const bool timed = begin.timed && end.timed && from.recorded && to.recorded;
            if (!timed || from.capture || to.capture) return CUDA_ERROR_INVALID_HANDLE;
            if (!from.reached() || !to.reached()) return CUDA_ERROR_NOT_READY;
            *ms = static_cast<float>(to.ns() - from.ns()) / 1e6f;
            return CUDA_SUCCESS;
        });
    });
}

RC_EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, uint64_t* id,
                                             CUgraph* graph, const CUgraphNode** nodes, size_t* count) {
    return entered(CONTEXT, [&] {
        if (is_legacy(handle))
            if (const CUresult implicit = check_legacy_stream(false)) return implicit;
        const auto stream = find_stream(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (!status || graph || nodes || count) return CUDA_ERROR_INVALID_VALUE;  // the graph is not emulated
        uint64_t found = 0;
        *status = capture_status(*stream, &found);
        if (id) *id = found;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    return cuStreamGetCaptureInfo_v2(stream, status, nullptr, nullptr, nullptr, nullptr);
}

RC_EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    return with_stream(handle, [&](const auto& stream) {
        return is_legacy(handle) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : begin_capture(stream, mode);
    });
}

RC_EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    return with_stream(handle, [&](const auto& stream) {
        std::shared_ptr<Graph> captured;
        const CUresult result = end_capture(*stream, &captured);
        if (captured) *graph = graphs().add(captured);
        return result;
    });
}

RC_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return entered(DRIVER, [&] {
        if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
        *mode = exchange_mode(*mode);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph handle, unsigned long long) {
    return entered(CONTEXT, [&] {
        const auto graph = graphs().find(handle);
        if (!graph) return CUDA_ERROR_INVALID_HANDLE;
        const auto made = std::make_shared<GraphExec>();
        made->nodes = graph->nodes;
        *executable = executables().add(made);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    return with_stream(stream, [&](const auto& stream) {
        const auto graph = executables().find(handle);
        if (!graph) return CUDA_ERROR_INVALID_HANDLE;
        return add_step(*stream, [graph] {
            const std::lock_guard lock(graph->running);
            for (const Step& node : graph->nodes) node();
        });
    });
}

RC_EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    return entered(CONTEXT, [&] { return graphs().remove(graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}

RC_EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable) {
    return entered(CONTEXT,
                   [&] { return executables().remove(executable) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}
