// The CUDA kernels on the CPU, where every thread of every block is a real thread: for tests, and for machines without
// a GPU. Arenas may be in memory that processes share.
#pragma once

#include <span>

#include "kernels/cuda/kernels.cuh"

namespace ringcomm {

// Runs one grid with `blocks` blocks for each rank, and returns when all have ended; args.control reports failures. All
// ranks must have the same kernel, dtype and operation. Throws RC_ARGUMENT for an unknown kernel, or an operation that
// the dtype does not have. `seed` not 0: threads yield at flags, as the seed decides.
void launch_emulated(std::span<const cuda::Args> ranks, int blocks, int threads, uint64_t seed);

}  // namespace ringcomm
