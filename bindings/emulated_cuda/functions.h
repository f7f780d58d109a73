// The functions that the emulated driver exports: those of a CUDA driver, and two of its own.
#pragma once

#include "cuda/cuda_abi.h"

#define RC_EXPORT extern "C" __attribute__((visibility("default")))

namespace ringcomm::cu {

#define RC_FUNCTION(name, ...) RC_EXPORT CUresult name(__VA_ARGS__);
RC_CUDA_FUNCTIONS(RC_FUNCTION)
#undef RC_FUNCTION

// `seed` not 0: the threads of a kernel yield at flags, as the seed decides. `skip_launches`: a launch runs no kernel
// and has ended at once, to time what calls it. `unreachable`: memory of other processes cannot be opened. Returns 0.
RC_EXPORT int ringcomm_emulated_configure(uint64_t seed, int skip_launches, int unreachable);
RC_EXPORT uint64_t ringcomm_emulated_pinned_bytes();  // of this process

}  // namespace ringcomm::cu
