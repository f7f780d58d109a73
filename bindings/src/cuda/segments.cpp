#include "cuda/segments.h"

#include <algorithm>

#include "core/errors.h"

namespace ringcomm {
namespace {

constexpr uint64_t PAGE = 2 << 20;  // cuMemAlloc returns parts of blocks of this size, and a handle opens a whole block
constexpr uint64_t MOST = uint64_t{1} << 56;  // more than a GPU addresses

}  // namespace

DeviceSegments& DeviceSegments::of_process() {
    static DeviceSegments& segments =
        *new DeviceSegments;  // never destroyed: torch may free segments at the end of the process
    return segments;
}

void DeviceSegments::open(const GpuOfDriver& gpu, bool by_descriptor) {
    const std::lock_guard lock(mutex_);
    if (!find(gpu.ordinal)) gpus_.push_back({gpu, by_descriptor});
}

const DeviceSegments::Gpu* DeviceSegments::find(int ordinal) const {
    const auto found = std::find_if(gpus_.begin(), gpus_.end(), [&](const Gpu& gpu) { return gpu.ordinal == ordinal; });
    return found == gpus_.end() ? nullptr : &*found;
}

void* DeviceSegments::allocate(uint64_t bytes, int ordinal) try {
    const std::lock_guard lock(mutex_);
    const Gpu* const gpu = find(ordinal);
    if (!gpu || !bytes || bytes > MOST) return nullptr;
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    for (Segment& segment : segments_) {
        if (segment.used || segment.ordinal != ordinal || segment.memory.bytes != bytes) continue;
        segment.used = true;
        return reinterpret_cast<void*>(segment.memory.address);
    }
    segments_.reserve(segments_.size() + 1);
    const CurrentContext current(*gpu->driver, gpu->context);
    const OutsideCaptures mode(*gpu->driver);
    CUdeviceptr address = 0;
    if (gpu->by_descriptor)
        address = VirtualMemory::of_process().allocate(*gpu, bytes);
    else
        gpu->driver->check(gpu->driver->cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
    segments_.push_back({{address, bytes}, ordinal, true});
    return reinterpret_cast<void*>(address);
} catch (...) {  // of a GPU that has failed, or has too little memory
    return nullptr;
}

void DeviceSegments::free(void* memory) try {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(segments_.begin(), segments_.end(), [&](const Segment& segment) {
        return segment.used && segment.memory.address == reinterpret_cast<uint64_t>(memory);
    });
    if (found == segments_.end()) return;
    const Gpu& gpu = *find(found->ordinal);
    const CurrentContext current(*gpu.driver, gpu.context);
    const OutsideCaptures mode(*gpu.driver);
    gpu.driver->check(gpu.driver->cuCtxSynchronize(), "cuCtxSynchronize");  // as cudaFree does
    found->used = false;
} catch (...) {
    // The GPU has failed, or captures a stream: what is queued may still use the segment, so no other does.
}

rc_segment DeviceSegments::at(uint64_t address, int ordinal) {
    const std::lock_guard lock(mutex_);
    for (const Segment& segment : segments_) {
        const auto [begin, bytes] = segment.memory;
        if (segment.ordinal == ordinal && address >= begin && address - begin < bytes) return segment.memory;
    }
    return {};
}

}  // namespace ringcomm
