// Device memory: a file in memory for each allocation, which other processes map.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "bindings/emulated_cuda/capture.h"
#include "bindings/emulated_cuda/handles.h"

namespace ringcomm::emulated {
namespace {

struct DeviceMemory {
    enum Kind { ALLOCATED, OPENED, PINNED } kind;
    size_t bytes;
    int descriptor;
    ino_t inode;
    int opened = 1;  // how often, by the same handle
};

struct Memories {
    std::mutex mutex;
    std::map<CUdeviceptr, DeviceMemory> at;
};

Memories& memories() { return immortal<Memories>(); }

struct IpcHandle {  // in a CUipcMemHandle
    pid_t process;
    int descriptor;
    ino_t inode;
    size_t bytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));

// Maps a descriptor, which it takes over.
CUresult map(int descriptor, size_t bytes, DeviceMemory::Kind kind, CUdeviceptr* address) {
    struct stat status{};
    void* memory = descriptor < 0 || fstat(descriptor, &status) != 0
                       ? MAP_FAILED
                       : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) {
        if (descriptor >= 0) close(descriptor);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = reinterpret_cast<CUdeviceptr>(memory);
    memories().at[*address] = {kind, bytes, descriptor, status.st_ino};
    return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr address, DeviceMemory::Kind kind) {
    const std::lock_guard lock(memories().mutex);
    const auto found = memories().at.find(address);
    if (found == memories().at.end() || found->second.kind != kind) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.opened) return CUDA_SUCCESS;
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    if (found->second.descriptor >= 0) close(found->second.descriptor);
    memories().at.erase(found);
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ringcomm::emulated

using namespace ringcomm::emulated;

RC_EXPORT uint64_t ringcomm_emulated_pinned_bytes() {
    const std::lock_guard lock(memories().mutex);
    uint64_t bytes = 0;
    for (const auto& [at, memory] : memories().at)
        if (memory.kind == DeviceMemory::PINNED) bytes += memory.bytes;
    return bytes;
}

RC_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    return entered(CONTEXT, [&] {
        if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        const std::lock_guard lock(memories().mutex);
        const int descriptor = memfd_create("ringcomm emulated device", MFD_CLOEXEC);
        if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
            close(descriptor);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        return map(descriptor, bytes, DeviceMemory::ALLOCATED, address);
    });
}

RC_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    return entered(CONTEXT, [&] {
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        return address ? unmap(address, DeviceMemory::ALLOCATED) : CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    return entered(CONTEXT, [&] {
        if (!address || !bytes || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
        const std::lock_guard lock(memories().mutex);
        memories().at[reinterpret_cast<CUdeviceptr>(memory)] = {DeviceMemory::PINNED, bytes, -1, 0};
        *address = memory;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemFreeHost(void* address) {
    return entered(CONTEXT, [&] {
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        return unmap(reinterpret_cast<CUdeviceptr>(address), DeviceMemory::PINNED);
    });
}

// Arrays on the emulated device may be in any memory of the process.
RC_EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    return entered(CONTEXT, [&] {
        if (!value || !address || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_INVALID_VALUE;
        *static_cast<int*>(value) = 0;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    return entered(CONTEXT, [&] {
        if (!handle) return CUDA_ERROR_INVALID_VALUE;
        const std::lock_guard lock(memories().mutex);
        const auto found = memories().at.find(address);
        if (found == memories().at.end() || found->second.kind != DeviceMemory::ALLOCATED)
            return CUDA_ERROR_INVALID_VALUE;
        const IpcHandle filled{getpid(), found->second.descriptor, found->second.inode, found->second.bytes};
        *handle = {};
        memcpy(handle, &filled, sizeof filled);
        return CUDA_SUCCESS;
    });
}

// A handle that is open already gives the same address once more.
RC_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    return entered(CONTEXT, [&] {
        if (!address || flags > CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        if (settings.unreachable) return CUDA_ERROR_NOT_SUPPORTED;
        IpcHandle from;
        memcpy(&from, &handle, sizeof from);
        const std::lock_guard lock(memories().mutex);
        for (auto& [at, memory] : memories().at)
            if (memory.kind == DeviceMemory::OPENED && memory.inode == from.inode) {
                ++memory.opened;
                *address = at;
                return CUDA_SUCCESS;
            }
        char path[64];
        std::snprintf(path, sizeof path, "/proc/%d/fd/%d", from.process, from.descriptor);
        const int descriptor = open(path, O_RDWR | O_CLOEXEC);
        struct stat status{};
        if (descriptor < 0 || fstat(descriptor, &status) != 0 || status.st_ino != from.inode) {
            if (descriptor >= 0) close(descriptor);
            return CUDA_ERROR_INVALID_VALUE;  // the process has ended, or freed the memory
        }
        return map(descriptor, from.bytes, DeviceMemory::OPENED, address);
    });
}

RC_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    return entered(CONTEXT, [&] {
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        return unmap(address, DeviceMemory::OPENED);
    });
}
