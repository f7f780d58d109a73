#include "cuda/virtual_memory.h"

#include "core/errors.h"

namespace ringcomm {
namespace {

CUmemAllocationProp properties(const GpuOfDriver& gpu) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal};
    return properties;
}

void check(const Driver& driver, CUresult result, const char* what) {
    if (result == CUDA_ERROR_OUT_OF_MEMORY) throw Failure(RC_MEMORY, format("%s: ", what) + driver.describe(result));
    driver.check(result, what);
}

}  // namespace

VirtualMemory& VirtualMemory::of_process() {
    static VirtualMemory& memory = *new VirtualMemory;  // memory may be closed at the end of the process
    return memory;
}

CUdeviceptr VirtualMemory::allocate(const GpuOfDriver& gpu, uint64_t bytes) {
    const Driver& driver = *gpu.driver;
    const CUmemAllocationProp wanted = properties(gpu);
    size_t page = 0;
    driver.check(driver.cuMemGetAllocationGranularity(&page, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
    bytes = (bytes + page - 1) / page * page;
    CUmemGenericAllocationHandle memory = 0;
    check(driver, driver.cuMemCreate(&memory, bytes, &wanted, 0), "cuMemCreate");
    return map(gpu, memory, bytes);
}

std::pair<int, uint64_t> VirtualMemory::descriptor(CUdeviceptr address) {
    const std::lock_guard lock(mutex_);
    const Mapping& mapping = at(address);
    const CurrentContext current(*mapping.gpu.driver, mapping.gpu.context);
    int descriptor = -1;
    mapping.gpu.driver->check(mapping.gpu.driver->cuMemExportToShareableHandle(
                                  &descriptor, mapping.memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                              "cuMemExportToShareableHandle");
    return {descriptor, mapping.bytes};
}

CUdeviceptr VirtualMemory::open(const GpuOfDriver& gpu, int descriptor, uint64_t bytes) {
    const Driver& driver = *gpu.driver;
    const CurrentContext current(driver, gpu.context);
    CUmemGenericAllocationHandle memory = 0;
    driver.check(
        driver.cuMemImportFromShareableHandle(&memory, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
    return map(gpu, memory, bytes);
}

// Takes over the handle.
CUdeviceptr VirtualMemory::map(const GpuOfDriver& gpu, CUmemGenericAllocationHandle memory, uint64_t bytes) {
    const Driver& driver = *gpu.driver;
    const CurrentContext current(driver, gpu.context);
    CUdeviceptr address = 0;
    bool mapped = false;
    try {
        check(driver, driver.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
        check(driver, driver.cuMemMap(address, bytes, 0, memory, 0), "cuMemMap");
        mapped = true;
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        check(driver, driver.cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess");
        const std::lock_guard lock(mutex_);
        mapped_.emplace(address, Mapping{gpu, bytes, memory});
        return address;
    } catch (...) {
        if (mapped) driver.cuMemUnmap(address, bytes);
        if (address) driver.cuMemAddressFree(address, bytes);
        driver.cuMemRelease(memory);
        throw;
    }
}

void VirtualMemory::close(CUdeviceptr address) {
    const std::lock_guard lock(mutex_);
    const Mapping mapping = at(address);
    mapped_.erase(address);
    const Driver& driver = *mapping.gpu.driver;
    const CurrentContext current(driver, mapping.gpu.context);
    driver.check(driver.cuMemUnmap(address, mapping.bytes), "cuMemUnmap");
    driver.check(driver.cuMemAddressFree(address, mapping.bytes), "cuMemAddressFree");
    driver.check(driver.cuMemRelease(mapping.memory), "cuMemRelease");
}

const VirtualMemory::Mapping& VirtualMemory::at(CUdeviceptr address) {
    const auto found = mapped_.find(address);
    if (found == mapped_.end()) rejectf("address: expected memory that is mapped by a descriptor, got %llx", address);
    return found->second;
}

}  // namespace ringcomm
