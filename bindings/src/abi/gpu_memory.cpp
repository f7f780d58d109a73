// The C ABI of the memory of GPUs: segments of torch's allocator, and virtual memory that other processes map.
#include <tuple>

#include "abi/check.h"
#include "cuda/segments.h"
#include "cuda/virtual_memory.h"

using namespace ringcomm;

namespace {

GpuOfDriver gpu_of(const char* driver, void* context, int ordinal) {
    check_pointer("driver", driver);
    check_pointer("context", context);
    check_range("ordinal", ordinal, 0, INT32_MAX);
    return {&open_driver(driver), static_cast<CUcontext>(context), ordinal};
}

}  // namespace

int rc_segments_open(const char* driver, void* context, int ordinal, int by_descriptor) {
    return guarded([&] { DeviceSegments::of_process().open(gpu_of(driver, context, ordinal), by_descriptor); });
}

int rc_virtual_allocate(const char* driver, void* context, int ordinal, uint64_t bytes, uint64_t* address) {
    return guarded([&] {
        check_pointer("address", address);
        if (!bytes || bytes > MAX_BYTES) reject("bytes: expected at least 1, and at most 2^62");
        *address = VirtualMemory::of_process().allocate(gpu_of(driver, context, ordinal), bytes);
    });
}

int rc_virtual_descriptor(uint64_t address, int* descriptor, uint64_t* bytes) {
    return guarded([&] {
        check_pointer("descriptor", descriptor);
        check_pointer("bytes", bytes);
        std::tie(*descriptor, *bytes) = VirtualMemory::of_process().descriptor(address);
    });
}

int rc_virtual_open(const char* driver, void* context, int ordinal, int descriptor, uint64_t bytes, uint64_t* address) {
    return guarded([&] {
        check_pointer("address", address);
        *address = VirtualMemory::of_process().open(gpu_of(driver, context, ordinal), descriptor, bytes);
    });
}

int rc_virtual_close(uint64_t address) {
    return guarded([&] { VirtualMemory::of_process().close(address); });
}

void* rc_segment_allocate(uint64_t bytes, int ordinal) { return DeviceSegments::of_process().allocate(bytes, ordinal); }

void rc_segment_free(void* segment) { DeviceSegments::of_process().free(segment); }

int rc_segment_of(uint64_t address, int ordinal, rc_segment* segment) {
    return guarded([&] {
        check_pointer("segment", segment);
        *segment = DeviceSegments::of_process().at(address, ordinal);
    });
}
