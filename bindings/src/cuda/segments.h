// Segments: memory of a GPU that the allocator of a program takes, as that of torch does, and that peers can open.
//
// Peers may have a segment mapped, and CUDA leaves undefined what freeing it does then. So each lives until the process
// ends, and a freed one is the next of its size.
#pragma once

#include <mutex>
#include <vector>

#include "cuda/virtual_memory.h"
#include "ringcomm.h"

namespace ringcomm {

class DeviceSegments {
public:
    static DeviceSegments& of_process();

    // Lets the program take segments of a GPU; with `by_descriptor` virtual memory.
    void open(const GpuOfDriver& gpu, bool by_descriptor);
    // Null: the GPU is not open, or has not enough memory.
    void* allocate(uint64_t bytes, int ordinal);
    // Once all work of the GPU has ended, which may use the segment; if that cannot be awaited, as while a stream of
    // the GPU is captured, the segment is not used again. Ignores other memory.
    void free(void* segment);
    // The segment of a GPU that an address is in; an empty one if there is none.
    rc_segment at(uint64_t address, int ordinal);

private:
    struct Gpu : GpuOfDriver {
        bool by_descriptor;
    };
    struct Segment {
        rc_segment memory;
        int ordinal;
        bool used;
    };
    const Gpu* find(int ordinal) const;

    std::mutex mutex_;  // guards these
    std::vector<Gpu> gpus_;
    std::vector<Segment> segments_;
};

}  // namespace ringcomm
