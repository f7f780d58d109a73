// The functions that the emulated driver exports: those of a CUDA driver, and two of its own.
#pragma once

#include "cuda/cuda_abi.h"

#define RC_EXPORT extern "C" __attribute__((visibility("default")))

namespace ringcomm::cu {

#define RC_FUNCTION(name, ...) RC_EXPORT CUresult name(__VA_ARGS__);
RC_CUDA_FUNCTIONS(RC_FUNCTION)
#undef RC_FUNCTION

// `seed` not 0: the threads of a kernel yield at flags, as the seed decides. `skip_launches`: a launch runs no kernel
// and has ended at once, to time what calls it. `await_launches`: a launch returns once its kernel has ended.
// `unreachable`: memory of other processes cannot be opened. Returns 0.
RC_EXPORT int ringcomm_emulated_configure(uint64_t seed, int skip_launches, int await_launches, int unreachable);

// How often this process has called cuLaunchKernel, cuEventRecord and cuStreamQuery. Returns 0.
RC_EXPORT int ringcomm_emulated_calls(uint64_t* launches, uint64_t* event_records, uint64_t* stream_queries);
RC_EXPORT uint64_t ringcomm_emulated_pinned_bytes();  // of this process

}  // namespace ringcomm::cu
