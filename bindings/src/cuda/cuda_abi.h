// The part of the CUDA driver's ABI that ringcomm uses, of CUDA 12.0 and later. The CUDA toolkit, whose cuda.h says the
// same, is not needed to build ringcomm; tests/native/cuda/test_cuda_abi.cpp compares the two where it is there.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUevent_st;
struct CUstream_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

namespace ringcomm::cu {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = CUctx_st*;
using CUmodule = CUmod_st*;
using CUfunction = CUfunc_st*;
using CUevent = CUevent_st*;
using CUstream = CUstream_st*;
using CUgraph = CUgraph_st*;
using CUgraphNode = CUgraphNode_st*;
using CUgraphExec = CUgraphExec_st*;
using CUhostFn = void (*)(void* data);

struct CUuuid {
    char bytes[16];
};

struct CUipcMemHandle {
    char reserved[64];
};

using CUmemGenericAllocationHandle = unsigned long long;
struct CUmemLocation {
    unsigned type;  // CU_MEM_LOCATION_TYPE_…
    int id;
};
struct CUmemAllocationProp {
    unsigned type;                  // CU_MEM_ALLOCATION_TYPE_…
    unsigned requestedHandleTypes;  // CU_MEM_HANDLE_TYPE_…
    CUmemLocation location;
    void* win32HandleMetaData;
    unsigned char allocFlags[8];
};
struct CUmemAccessDesc {
    CUmemLocation location;
    unsigned flags;  // CU_MEM_ACCESS_FLAGS_PROT_…
};

// The number, the name and the text of each error.
#define RC_CUDA_RESULTS(ROW)                                                                                       \
    ROW(CUDA_SUCCESS, 0, "no error")                                                                               \
    ROW(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                                           \
    ROW(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                              \
    ROW(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                                     \
    ROW(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                           \
    ROW(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                                  \
    ROW(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                                                 \
    ROW(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                                             \
    ROW(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                                 \
    ROW(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state")                   \
    ROW(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                                       \
    ROW(CUDA_ERROR_NOT_READY, 600, "device not ready")                                                             \
    ROW(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled")                             \
    ROW(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                               \
    ROW(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720, "too many blocks in cooperative launch")                     \
    ROW(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                                                  \
    ROW(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                                                  \
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing")            \
    ROW(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture")     \
    ROW(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences")   \
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began")          \
    ROW(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                             \
    ROW(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream")       \
    ROW(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906,                                                                   \
        "operation would make the legacy stream depend on a capturing blocking stream")                            \
    ROW(CUDA_ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream") \
    ROW(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908,                                                               \
        "attempt to terminate a thread-local capture sequence from another thread")

enum CUresult : unsigned {
#define RC_ROW(name, number, text) name = number,
    RC_CUDA_RESULTS(RC_ROW)
#undef RC_ROW
};

enum CUdevice_attribute : unsigned {
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
};

enum : unsigned {
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
};
enum CUmemAllocationHandleType : unsigned { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 };
enum CUmemAllocationGranularity_flags : unsigned { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };

enum CUpointer_attribute : unsigned { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };

enum CUstreamCaptureStatus : unsigned {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};

enum CUstreamCaptureMode : unsigned {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

enum : unsigned {
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4,
};
enum : unsigned { CU_STREAM_NON_BLOCKING = 1 };
enum : unsigned { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
enum : unsigned { HOST_ALLOC_PORTABLE = 1, HOST_ALLOC_DEVICEMAP = 2 };  // CU_MEMHOSTALLOC_…, macros in cuda.h

// Handles that no call creates: CU_STREAM_LEGACY (NULL too) and CU_STREAM_PER_THREAD, macros in cuda.h.
inline const CUstream STREAM_LEGACY = reinterpret_cast<CUstream>(1), STREAM_PER_THREAD = reinterpret_cast<CUstream>(2);

// Every function under the name that the library exports, with its parameters.
#define RC_CUDA_FUNCTIONS(FUNCTION)                                                                                    \
    FUNCTION(cuInit, unsigned flags)                                                                                   \
    FUNCTION(cuDriverGetVersion, int* version)                                                                         \
    FUNCTION(cuGetErrorName, CUresult error, const char** name)                                                        \
    FUNCTION(cuGetErrorString, CUresult error, const char** text)                                                      \
    FUNCTION(cuDeviceGetCount, int* count)                                                                             \
    FUNCTION(cuDeviceGet, CUdevice* device, int ordinal)                                                               \
    FUNCTION(cuDeviceGetName, char* name, int bytes, CUdevice device)                                                  \
    FUNCTION(cuDeviceGetUuid_v2, CUuuid* uuid, CUdevice device)                                                        \
    FUNCTION(cuDeviceGetAttribute, int* value, CUdevice_attribute attribute, CUdevice device)                          \
    FUNCTION(cuDevicePrimaryCtxRetain, CUcontext* context, CUdevice device)                                            \
    FUNCTION(cuCtxPushCurrent_v2, CUcontext context)                                                                   \
    FUNCTION(cuCtxPopCurrent_v2, CUcontext* context)                                                                   \
    FUNCTION(cuCtxGetCurrent, CUcontext* context)                                                                      \
    FUNCTION(cuCtxSetCurrent, CUcontext context)                                                                       \
    FUNCTION(cuCtxGetDevice, CUdevice* device)                                                                         \
    FUNCTION(cuCtxSynchronize, void)                                                                                   \
    FUNCTION(cuCtxEnablePeerAccess, CUcontext peer, unsigned flags)                                                    \
    FUNCTION(cuCtxGetStreamPriorityRange, int* least, int* greatest)                                                   \
    FUNCTION(cuMemAlloc_v2, CUdeviceptr* address, size_t bytes)                                                        \
    FUNCTION(cuMemFree_v2, CUdeviceptr address)                                                                        \
    FUNCTION(cuMemHostAlloc, void** address, size_t bytes, unsigned flags)                                             \
    FUNCTION(cuMemFreeHost, void* address)                                                                             \
    FUNCTION(cuMemcpyAsync, CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream)                     \
    FUNCTION(cuMemsetD8Async, CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream)                  \
    FUNCTION(cuPointerGetAttribute, void* value, CUpointer_attribute attribute, CUdeviceptr address)                   \
    FUNCTION(cuIpcGetMemHandle, CUipcMemHandle* handle, CUdeviceptr address)                                           \
    FUNCTION(cuIpcOpenMemHandle_v2, CUdeviceptr* address, CUipcMemHandle handle, unsigned flags)                       \
    FUNCTION(cuIpcCloseMemHandle, CUdeviceptr address)                                                                 \
    FUNCTION(cuMemGetAllocationGranularity, size_t* bytes, const CUmemAllocationProp* properties,                      \
             CUmemAllocationGranularity_flags flags)                                                                   \
    FUNCTION(cuMemCreate, CUmemGenericAllocationHandle* memory, size_t bytes, const CUmemAllocationProp* properties,   \
             unsigned long long flags)                                                                                 \
    FUNCTION(cuMemRelease, CUmemGenericAllocationHandle memory)                                                        \
    FUNCTION(cuMemExportToShareableHandle, void* shareable, CUmemGenericAllocationHandle memory,                       \
             CUmemAllocationHandleType type, unsigned long long flags)                                                 \
    FUNCTION(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle* memory, void* shareable,                    \
             CUmemAllocationHandleType type)                                                                           \
    FUNCTION(cuMemAddressReserve, CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wanted,            \
             unsigned long long flags)                                                                                 \
    FUNCTION(cuMemAddressFree, CUdeviceptr address, size_t bytes)                                                      \
    FUNCTION(cuMemMap, CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,          \
             unsigned long long flags)                                                                                 \
    FUNCTION(cuMemSetAccess, CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count)           \
    FUNCTION(cuMemUnmap, CUdeviceptr address, size_t bytes)                                                            \
    FUNCTION(cuModuleLoadData, CUmodule* module, const void* image)                                                    \
    FUNCTION(cuModuleGetFunction, CUfunction* function, CUmodule module, const char* name)                             \
    FUNCTION(cuLaunchKernel, CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** parameters,            \
             void** extra)                                                                                             \
    FUNCTION(cuLaunchCooperativeKernel, CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,        \
             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,             \
             void** parameters)                                                                                        \
    FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, CUfunction function, int threads,               \
             size_t shared_bytes)                                                                                      \
    FUNCTION(cuLaunchHostFunc, CUstream stream, CUhostFn function, void* data)                                         \
    FUNCTION(cuStreamCreateWithPriority, CUstream* stream, unsigned flags, int priority)                               \
    FUNCTION(cuStreamDestroy_v2, CUstream stream)                                                                      \
    FUNCTION(cuStreamSynchronize, CUstream stream)                                                                     \
    FUNCTION(cuStreamQuery, CUstream stream)                                                                           \
    FUNCTION(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned flags)                                        \
    FUNCTION(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus* status)                                      \
    FUNCTION(cuStreamGetCaptureInfo_v2, CUstream stream, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph,  \
             const CUgraphNode** nodes, size_t* count)                                                                 \
    FUNCTION(cuStreamBeginCapture_v2, CUstream stream, CUstreamCaptureMode mode)                                       \
    FUNCTION(cuStreamEndCapture, CUstream stream, CUgraph* graph)                                                      \
    FUNCTION(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode* mode)                                             \
    FUNCTION(cuEventCreate, CUevent* event, unsigned flags)                                                            \
    FUNCTION(cuEventRecord, CUevent event, CUstream stream)                                                            \
    FUNCTION(cuEventQuery, CUevent event)                                                                              \
    FUNCTION(cuEventSynchronize, CUevent event)                                                                        \
    FUNCTION(cuEventElapsedTime, float* ms, CUevent begin, CUevent end)                                                \
    FUNCTION(cuEventDestroy_v2, CUevent event)                                                                         \
    FUNCTION(cuGraphInstantiateWithFlags, CUgraphExec* executable, CUgraph graph, unsigned long long flags)            \
    FUNCTION(cuGraphLaunch, CUgraphExec executable, CUstream stream)                                                   \
    FUNCTION(cuGraphDestroy, CUgraph graph)                                                                            \
    FUNCTION(cuGraphExecDestroy, CUgraphExec executable)

// The types of these functions.
namespace type {
#define RC_FUNCTION(name, ...) using name = CUresult(__VA_ARGS__);
RC_CUDA_FUNCTIONS(RC_FUNCTION)
#undef RC_FUNCTION
}  // namespace type

}  // namespace ringcomm::cu
