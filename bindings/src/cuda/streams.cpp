#include "cuda/streams.h"

#include "core/errors.h"

namespace ringcomm {

GpuStreams::GpuStreams(const Driver& driver) : driver_(driver) {
    int least, most;
    driver.check(driver.cuCtxGetStreamPriorityRange(&least, &most), "cuCtxGetStreamPriorityRange");
    for (CUstream* stream : {&own_, &captured_, &probe_}) {
        driver.check(driver.cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, most),
                     "cuStreamCreateWithPriority");
    }
}

// The launches are over. What fails here fails because the GPU has.
GpuStreams::~GpuStreams() {
    const auto destroy = [&](CUevent event) {
        if (event) driver_.cuEventDestroy_v2(event);
    };
    for (CUevent event : ends_) destroy(event);
    for (CUevent event : captured_ends_) destroy(event);
    destroy(ready_);
    destroy(switched_);
    for (CUstream stream : {own_, captured_, probe_}) driver_.cuStreamDestroy_v2(stream);
}

uint64_t GpuStreams::capture_of(CUstream stream) const {
    CUstreamCaptureStatus status;
    uint64_t id = 0;
    const CUresult result = driver_.cuStreamGetCaptureInfo_v2(stream, &status, &id, nullptr, nullptr, nullptr);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
        reject("the default stream cannot be used while a CUDA graph is captured on another stream", "another stream");
    }
    driver_.check(result, "cuStreamGetCaptureInfo");
    if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED) {
        reject("the capture of this stream has failed", "one that can still be ended");
    }
    return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
}

bool GpuStreams::last_stream_is_captured(CUstream stream) const {
    if (last_ == stream || has_event(last_)) return false;
    CUstreamCaptureStatus status;
    const CUresult result = driver_.cuStreamIsCapturing(last_, &status);
    return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool GpuStreams::has_event(CUstream stream) const { return stream == own_ || stream == STREAM_PER_THREAD; }

void GpuStreams::record(CUevent& event, CUstream stream) {
    if (!event) driver_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    driver_.check(driver_.cuEventRecord(event, stream), "cuEventRecord");
}

CUstream GpuStreams::begin(CUstream stream, bool async, bool last_ended) {
    const CUstream on = async ? own_ : stream;
    if (async) {
        record(ready_, stream);
        wait(own_, ready_);
    }
    const bool ordered = last_ == on || (async && last_ == stream);
    if (last_ended || (ordered && last_ != STREAM_PER_THREAD)) return on;
    if (has_event(last_)) {
        wait(on, end_of(last_number_));
    } else {
        record(switched_, last_);
        wait(on, switched_);
    }
    return on;
}

void GpuStreams::end(uint64_t number, CUstream stream) {
    if (has_event(stream)) record(end_of(number), stream);
    last_ = stream;
    last_number_ = number;
}

CUstream GpuStreams::begin_captured(CUstream stream, uint64_t capture) {
    const uint64_t other = capture_of(captured_);
    if (other && other != capture) {
        reject("calls of one communicator are captured into two CUDA graphs at once", "one capture after the other");
    }
    record(ready_, stream);
    wait(captured_, ready_);
    return captured_;
}

void GpuStreams::end_captured(uint64_t number, CUstream stream, bool async) {
    record(end_of(number), captured_);
    if (!async) wait(stream, end_of(number));
}

}  // namespace ringcomm
