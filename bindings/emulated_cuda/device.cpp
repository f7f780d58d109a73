// The device, its one context, modules and launches.
#include <cstring>
#include <string_view>
#include <vector>

#include "bindings/emulated_cuda/capture.h"
#include "bindings/emulated_cuda/handles.h"
#include "bindings/emulated_cuda/launch.h"

namespace ringcomm::emulated {
namespace {

constexpr int VERSION = 13000;
constexpr int MULTIPROCESSORS = 132;  // as an H100
constexpr int MAX_THREADS = 1024;     // of a block, and of a multiprocessor

enum EntryPoint { KERNEL, VIRTUAL, MESSAGES, OTHER };

struct Module {};

auto& modules() { return immortal<Handles<CUmodule, Module>>(); }
auto& functions() { return immortal<Handles<CUfunction, EntryPoint>>(); }

const CUcontext primary = reinterpret_cast<CUcontext>(&settings);
thread_local std::vector<CUcontext> contexts;

bool exists(CUdevice device) { return device == 0; }

// In place of the kernel: what it writes when it ends.
void skip(const cuda::Args& args) {
    cuda::Control& control = *args.control;
    if (args.call & cuda::CAPTURED) {
        const uint64_t epoch = cuda::load_relaxed(&control.replay_ended) + 1;
        cuda::store_relaxed(&control.replay_started, epoch);
        cuda::store_relaxed(&control.replay_ended, epoch);
    } else {
        cuda::store_relaxed(&control.completed, args.call);
    }
}

template <class Launch>
CUresult queue(Stream& stream, const Launch& launch) {
    if (settings.skip_launches && !stream.capturing && stream.run_now([&] { launch(); })) return CUDA_SUCCESS;
    return add_step(stream, launch);
}

CUresult launch(EntryPoint function, const KernelStep& launch, CUstream handle) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (function == OTHER) return CUDA_ERROR_NOT_SUPPORTED;
    if (function == KERNEL && launch.refusal()) return CUDA_ERROR_INVALID_VALUE;
    const CUresult added = queue(*stream, launch);
    if (settings.await_launches && !stream->capturing) stream->synchronize();
    return added;
}

CUresult launch(const MessagesStep& launch, CUstream handle) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (cuda::refusal(launch.args, launch.grid)) return CUDA_ERROR_INVALID_VALUE;
    return queue(*stream, launch);
}

EntryPoint entry_point(std::string_view name) {
    if (name == "ringcomm_kernel") return KERNEL;
    if (name == "ringcomm_virtual") return VIRTUAL;
    return name == "ringcomm_messages" ? MESSAGES : OTHER;
}

}  // namespace

CUcontext current_context() { return contexts.empty() ? nullptr : contexts.back(); }

const char* KernelStep::refusal() const { return cuda::refusal(ranks, blocks); }

void KernelStep::operator()() const {
    if (settings.failed != CUDA_SUCCESS) return;  // the context runs nothing more
    if (settings.skip_launches) {
        for (const cuda::Args& each : ranks) skip(each);
    } else if (refusal()) {
        settings.failed = CUDA_ERROR_LAUNCH_FAILED;
    } else {
        launch_emulated(ranks, blocks, threads, settings.seed);
    }
}

void MessagesStep::operator()() const {
    if (settings.failed != CUDA_SUCCESS) return;
    if (settings.skip_launches) {
        for (int i = 0; i < args.count; ++i) {  // the senders use the slots again
            const cuda::MessageTransfer& each = args.transfers[i];
            if (each.kind == cuda::FETCH) cuda::store_relaxed(args.arena.released(each.arena, each.slot), each.number);
        }
        cuda::store_relaxed(args.completed, args.call);
    } else {
        launch_emulated(args, grid, threads, settings.seed);
    }
}

}  // namespace ringcomm::emulated

using namespace ringcomm::emulated;
using ringcomm::cuda::Args;
using ringcomm::cuda::MessageArgs;
using ringcomm::cuda::VirtualRanks;

RC_EXPORT int ringcomm_emulated_configure(uint64_t seed, int skip_launches, int await_launches, int unreachable) {
    settings.seed = seed;
    settings.skip_launches = skip_launches;
    settings.await_launches = await_launches;
    settings.unreachable = unreachable;
    return CUDA_SUCCESS;
}

RC_EXPORT int ringcomm_emulated_calls(uint64_t* launches, uint64_t* event_records, uint64_t* stream_queries) {
    *launches = calls.launches;
    *event_records = calls.event_records;
    *stream_queries = calls.stream_queries;
    return CUDA_SUCCESS;
}

RC_EXPORT CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    settings.initialized = true;
    return CUDA_SUCCESS;
}

RC_EXPORT CUresult cuDriverGetVersion(int* version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = VERSION;
    return CUDA_SUCCESS;
}

RC_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
    switch (error) {
#define RC_ROW(NAME, number, text) \
    case NAME: *name = #NAME; return CUDA_SUCCESS;
        RC_CUDA_RESULTS(RC_ROW)
#undef RC_ROW
    }
    *name = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

RC_EXPORT CUresult cuGetErrorString(CUresult error, const char** string) {
    switch (error) {
#define RC_ROW(NAME, number, text) \
    case NAME: *string = text; return CUDA_SUCCESS;
        RC_CUDA_RESULTS(RC_ROW)
#undef RC_ROW
    }
    *string = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

RC_EXPORT CUresult cuDeviceGetCount(int* count) {
    return entered(DRIVER, [&] {
        *count = 1;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return entered(DRIVER, [&] {
        if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
        *device = 0;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    return entered(DRIVER, [&] {
        if (!name || bytes < 1) return CUDA_ERROR_INVALID_VALUE;
        if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
        strncpy(name, "emulated", bytes);
        name[bytes - 1] = 0;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    return entered(DRIVER, [&] {
        if (!uuid) return CUDA_ERROR_INVALID_VALUE;
        if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
        *uuid = {"emulated"};
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return entered(DRIVER, [&] {
        if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
        switch (attribute) {
            case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = MAX_THREADS; break;
            case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
            case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
            case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
            case CU_DEVICE_ATTRIBUTE_WARP_SIZE:  // a block of one thread is allowed
            case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
            case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
            case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
            case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *value = 1; break;
            default: return CUDA_ERROR_INVALID_VALUE;
        }
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return entered(DRIVER, [&] {
        if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
        *context = primary;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return entered(DRIVER, [&] {
        if (context != primary) return CUDA_ERROR_INVALID_CONTEXT;
        contexts.push_back(context);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    return entered(DRIVER, [&] {
        if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
        if (context) *context = contexts.back();
        contexts.pop_back();
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
    return entered(DRIVER, [&] {
        *context = current_context();
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    return entered(DRIVER, [&] {
        if (context && context != primary) return CUDA_ERROR_INVALID_CONTEXT;
        if (!contexts.empty()) contexts.pop_back();
        if (context) contexts.push_back(context);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
    return entered(CONTEXT, [&] {
        *device = 0;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
    return entered(CONTEXT, [&] {  // its only context
        return peer == primary ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_CONTEXT;
    });
}

RC_EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    return entered(CONTEXT, [&] {
        if (!module || !image) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        *module = modules().add(std::make_shared<Module>());
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return entered(CONTEXT, [&] {
        if (!modules().find(module)) return CUDA_ERROR_INVALID_HANDLE;
        *function = functions().add(std::make_shared<EntryPoint>(entry_point(name)));
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CUstream stream,
                                  void** parameters, void** extra) {
    ++calls.launches;
    return entered(CONTEXT, [&] {
        const auto function = functions().find(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return CUDA_ERROR_INVALID_VALUE;
        if (!grid_x || !block_x || block_x > MAX_THREADS || !parameters || extra) return CUDA_ERROR_INVALID_VALUE;
        const int grid = static_cast<int>(grid_x), threads = static_cast<int>(block_x);
        if (*function == MESSAGES)
            return launch({*static_cast<const MessageArgs*>(parameters[0]), grid, threads}, stream);
        const auto* ranks = static_cast<const Args*>(parameters[0]);
        if (*function != VIRTUAL) return launch(*function, {{*ranks}, grid, threads}, stream);
        const int blocks = *static_cast<const int*>(parameters[1]);
        if (blocks < 1 || grid % blocks != 0 || grid / blocks > VirtualRanks::MOST) return CUDA_ERROR_INVALID_VALUE;
        return launch(VIRTUAL, {{ranks, ranks + grid / blocks}, blocks, threads}, stream);
    });
}

RC_EXPORT CUresult cuLaunchCooperativeKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                             CUstream stream, void** parameters) {
    if (grid_x > MULTIPROCESSORS) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return cuLaunchKernel(handle, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters,
                          nullptr);
}

RC_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int, size_t) {
    return entered(CONTEXT, [&] {
        if (!functions().find(function)) return CUDA_ERROR_INVALID_HANDLE;
        *blocks = 1;
        return CUDA_SUCCESS;
    });
}
