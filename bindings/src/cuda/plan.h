// Which kernel does a collective, on how many blocks.
#pragma once

#include "core/call_record.h"
#include "kernels/cuda/kernels.cuh"

namespace ringcomm {

struct LaunchPlan {
    int kernel, dtype, op;
    int blocks;
    uint64_t count;    // elements of the array, or of a block
    bool with_tables;  // blocks of unequal lengths, which stand in tables
};

// The plan of a call whose arguments have been checked; `kernel` replaces that for its size, unless it is -1.
LaunchPlan plan_launch(const CallRecord& call, int size, const cuda::Shape& shape, const rc_cuda_limits& limits,
                       int kernel = -1);

// The bytes of the source and of the target of a call on this rank.
struct CallBytes {
    uint64_t source, target;
};
CallBytes bytes_of(const CallRecord& call, int rank, int size);

}  // namespace ringcomm
