// The functions of the CUDA driver that a launch needs: those of libcuda, or of a library with the same functions, as
// the emulated driver is. What is not hot calls the driver from Python (ringcomm/devices/driver.py).
#pragma once

#include <string>

#include "cuda/cuda_abi.h"

namespace ringcomm {

using namespace cu;

#define RC_LAUNCH_FUNCTIONS(FUNCTION)           \
    FUNCTION(cuGetErrorName)                    \
    FUNCTION(cuGetErrorString)                  \
    FUNCTION(cuCtxGetCurrent)                   \
    FUNCTION(cuCtxSetCurrent)                   \
    FUNCTION(cuCtxPushCurrent_v2)               \
    FUNCTION(cuCtxPopCurrent_v2)                \
    FUNCTION(cuCtxSynchronize)                  \
    FUNCTION(cuCtxGetStreamPriorityRange)       \
    FUNCTION(cuThreadExchangeStreamCaptureMode) \
    FUNCTION(cuLaunchKernel)                    \
    FUNCTION(cuStreamCreateWithPriority)        \
    FUNCTION(cuStreamDestroy_v2)                \
    FUNCTION(cuStreamQuery)                     \
    FUNCTION(cuStreamWaitEvent)                 \
    FUNCTION(cuStreamGetCaptureInfo_v2)         \
    FUNCTION(cuEventCreate)                     \
    FUNCTION(cuEventDestroy_v2)                 \
    FUNCTION(cuEventRecord)                     \
    FUNCTION(cuEventQuery)                      \
    FUNCTION(cuStreamIsCapturing)               \
    FUNCTION(cuStreamSynchronize)               \
    FUNCTION(cuMemAlloc_v2)                     \
    FUNCTION(cuMemFree_v2)                      \
    FUNCTION(cuMemGetAllocationGranularity)     \
    FUNCTION(cuMemCreate)                       \
    FUNCTION(cuMemRelease)                      \
    FUNCTION(cuMemExportToShareableHandle)      \
    FUNCTION(cuMemImportFromShareableHandle)    \
    FUNCTION(cuMemAddressReserve)               \
    FUNCTION(cuMemAddressFree)                  \
    FUNCTION(cuMemMap)                          \
    FUNCTION(cuMemSetAccess)                    \
    FUNCTION(cuMemUnmap)                        \
    FUNCTION(cuMemHostAlloc)                    \
    FUNCTION(cuMemFreeHost)                     \
    FUNCTION(cuMemcpyAsync)                     \
    FUNCTION(cuDeviceGet)                       \
    FUNCTION(cuDevicePrimaryCtxRetain)          \
    FUNCTION(cuCtxEnablePeerAccess)             \
    FUNCTION(cuIpcGetMemHandle)                 \
    FUNCTION(cuIpcOpenMemHandle_v2)             \
    FUNCTION(cuIpcCloseMemHandle)

struct Driver {
#define RC_FUNCTION(name) type::name* name;
    RC_LAUNCH_FUNCTIONS(RC_FUNCTION)
#undef RC_FUNCTION

    // Throws RC_SYSTEM with CUDA's name and sentence for the status, unless it is a success.
    void check(CUresult status, const char* what) const;
    std::string describe(CUresult status) const;
};

// Opens a library, once; it stays open until the process ends. Throws RC_ARGUMENT if it lacks a function.
const Driver& open_driver(const char* library);

// Makes a context current for this thread, until the end of the block.
class CurrentContext {
public:
    CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
        CUcontext current = nullptr;
        driver.check(driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
        if (current == context) return;
        driver.check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
        pushed_ = true;
    }
    ~CurrentContext() {
        CUcontext ours;
        if (pushed_) driver_.cuCtxPopCurrent_v2(&ours);
    }
    CurrentContext(const CurrentContext&) = delete;

private:
    const Driver& driver_;
    bool pushed_ = false;
};

// While another thread captures into a CUDA graph, calls that a capture must not contain are refused, except from here.
class OutsideCaptures {
public:
    explicit OutsideCaptures(const Driver& driver) : driver_(driver) {
        driver.cuThreadExchangeStreamCaptureMode(&mode_);
    }
    ~OutsideCaptures() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
    OutsideCaptures(const OutsideCaptures&) = delete;

private:
    const Driver& driver_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace ringcomm
