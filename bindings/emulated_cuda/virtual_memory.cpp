// Virtual memory: addresses, and physical memory that is mapped there, a file in memory each.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "bindings/emulated_cuda/capture.h"
#include "bindings/emulated_cuda/handles.h"

namespace ringcomm::emulated {
namespace {

constexpr size_t PAGE = 2 << 20;

// Physical memory lives until its handle is released and it is mapped nowhere; a descriptor in another process counts.
struct Physical {
    const int descriptor;
    const size_t bytes;
    Physical(int descriptor, size_t bytes) : descriptor(descriptor), bytes(bytes) {}
    ~Physical() { close(descriptor); }
    Physical(const Physical&) = delete;
};

struct AddressRange {
    size_t bytes;
    std::shared_ptr<Physical> mapped;
};

struct VirtualMemories {
    std::mutex mutex;
    CUmemGenericAllocationHandle next = 1;
    std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> physical;
    std::map<CUdeviceptr, AddressRange> ranges;
};

VirtualMemories& virtual_memories() { return immortal<VirtualMemories>(); }

bool whole(size_t bytes) { return bytes && bytes % PAGE == 0; }

CUmemGenericAllocationHandle add(int descriptor, size_t bytes) {
    const CUmemGenericAllocationHandle handle = virtual_memories().next++;
    virtual_memories().physical[handle] = std::make_shared<Physical>(descriptor, bytes);
    return handle;
}

// Calls `body` with the range that begins at an address and has so many bytes.
template <class Body>
CUresult with_range(CUdeviceptr address, size_t bytes, Body body) {
    return entered(CONTEXT, [&]() -> CUresult {
        if (const CUresult unsafe = check_unsafe_call()) return unsafe;
        const std::lock_guard lock(virtual_memories().mutex);
        const auto found = virtual_memories().ranges.find(address);
        if (found == virtual_memories().ranges.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
        return body(found->second);
    });
}

bool remap(CUdeviceptr address, size_t bytes, int protection, int flags, int descriptor) {
    return mmap(reinterpret_cast<void*>(address), bytes, protection, flags | MAP_FIXED, descriptor, 0) != MAP_FAILED;
}

}  // namespace
}  // namespace ringcomm::emulated

using namespace ringcomm::emulated;

RC_EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                                 CUmemAllocationGranularity_flags) {
    return entered(DRIVER, [&] {
        if (!bytes || !properties) return CUDA_ERROR_INVALID_VALUE;
        *bytes = PAGE;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                               const CUmemAllocationProp* properties, unsigned long long flags) {
    return entered(DRIVER, [&] {
        if (!handle || !properties || !whole(bytes) || flags) return CUDA_ERROR_INVALID_VALUE;
        if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || properties->location.id != 0)
            return CUDA_ERROR_INVALID_VALUE;
        const int descriptor = memfd_create("ringcomm emulated device", MFD_CLOEXEC);
        if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
        if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
            close(descriptor);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        const std::lock_guard lock(virtual_memories().mutex);
        *handle = add(descriptor, bytes);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return entered(DRIVER, [&] {
        const std::lock_guard lock(virtual_memories().mutex);
        return virtual_memories().physical.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

RC_EXPORT CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                                CUmemAllocationHandleType type, unsigned long long flags) {
    return entered(DRIVER, [&] {
        if (!shareable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_INVALID_VALUE;
        const std::lock_guard lock(virtual_memories().mutex);
        const auto found = virtual_memories().physical.find(handle);
        if (found == virtual_memories().physical.end()) return CUDA_ERROR_INVALID_VALUE;
        const int descriptor = fcntl(found->second->descriptor, F_DUPFD_CLOEXEC, 0);
        if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
        *static_cast<int*>(shareable) = descriptor;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                                  CUmemAllocationHandleType type) {
    return entered(DRIVER, [&] {
        if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
        if (settings.unreachable) return CUDA_ERROR_NOT_SUPPORTED;
        const int descriptor = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shareable)), F_DUPFD_CLOEXEC, 0);
        struct stat status{};
        if (descriptor < 0 || fstat(descriptor, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
        const std::lock_guard lock(virtual_memories().mutex);
        *handle = add(descriptor, status.st_size);
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                       unsigned long long flags) {
    return entered(CONTEXT, [&] {
        if (!address || !whole(bytes) || alignment || wanted || flags) return CUDA_ERROR_INVALID_VALUE;
        void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
        const std::lock_guard lock(virtual_memories().mutex);
        *address = reinterpret_cast<CUdeviceptr>(range);
        virtual_memories().ranges[*address] = {bytes, nullptr};
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return with_range(address, bytes, [&](AddressRange& range) {
        if (range.mapped) return CUDA_ERROR_INVALID_VALUE;
        munmap(reinterpret_cast<void*>(address), bytes);
        virtual_memories().ranges.erase(address);
        return CUDA_SUCCESS;
    });
}

// Nothing can access it before cuMemSetAccess.
RC_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
    return with_range(address, bytes, [&](AddressRange& range) {
        const auto found = virtual_memories().physical.find(handle);
        if (range.mapped || offset || flags || found == virtual_memories().physical.end() ||
            found->second->bytes != bytes)
            return CUDA_ERROR_INVALID_VALUE;
        range.mapped = found->second;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
    return with_range(address, bytes, [&](AddressRange& range) {
        if (!range.mapped || !access || count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
        if (!remap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, range.mapped->descriptor))
            return CUDA_ERROR_OUT_OF_MEMORY;
        return CUDA_SUCCESS;
    });
}

RC_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    return with_range(address, bytes, [&](AddressRange& range) {
        if (!range.mapped) return CUDA_ERROR_INVALID_VALUE;
        range.mapped = nullptr;
        remap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        return CUDA_SUCCESS;
    });
}
