// Memory of a GPU that other processes map by a file descriptor: also those that do not see the GPU, which handles of
// cudaIpc need.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "cuda/driver.h"

namespace ringcomm {

struct GpuOfDriver {
    const Driver* driver;
    CUcontext context;  // its primary one
    int ordinal;
};

class VirtualMemory {
public:
    static VirtualMemory& of_process();

    // Rounds up to whole pages. Throws RC_MEMORY if there is not enough.
    CUdeviceptr allocate(const GpuOfDriver& gpu, uint64_t bytes);
    // Returns a new descriptor, with which other processes map the memory at an address, and its bytes.
    std::pair<int, uint64_t> descriptor(CUdeviceptr address);
    // Maps the memory behind a descriptor, which stays open.
    CUdeviceptr open(const GpuOfDriver& gpu, int descriptor, uint64_t bytes);
    // Unmaps what the others have returned. Memory lives until it is mapped nowhere.
    void close(CUdeviceptr address);

private:
    struct Mapping {
        GpuOfDriver gpu;
        uint64_t bytes;
        CUmemGenericAllocationHandle memory;
    };
    CUdeviceptr map(const GpuOfDriver& gpu, CUmemGenericAllocationHandle memory, uint64_t bytes);
    const Mapping& at(CUdeviceptr address);

    std::mutex mutex_;  // guards this
    std::map<CUdeviceptr, Mapping> mapped_;
};

}  // namespace ringcomm
