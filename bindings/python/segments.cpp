// The functions of an allocator of torch (torch.cuda.memory.CUDAPluggableAllocator), which finds them by name in the
// library of ringcomm._native. torch calls them without the GIL.
#include <sys/types.h>

#include "ringcomm.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* ringcomm_segment_allocate(ssize_t bytes, int device, void* /* stream */) {
    return rc_segment_allocate(bytes > 0 ? bytes : 0, device);
}

EXPORT void ringcomm_segment_free(void* segment, ssize_t /* bytes */, int /* device */, void* /* stream */) {
    rc_segment_free(segment);
}
