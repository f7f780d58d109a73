// The CUDA kernels on the CPU, where every thread of every block is a real thread: for tests, and for machines without
// a GPU. The arenas may lie in memory that other processes have too.
#pragma once

#include <span>

#include "cuda/kernels.cuh"

namespace ringcomm {

// Runs the kernel of a call as a GPU would, with so many blocks and threads, and returns when all have ended: well or
// badly, as args.control says. Several calls are a launch of several ranks in one grid, which must be of one kernel,
// dtype and operation. Throws RC_ARGUMENT: there is no such kernel, or no such operation for the dtype. `seed` not 0:
// threads give their core away at flags, as follows from it.
void launch_emulated(std::span<const cuda::Args> ranks, int blocks, int threads, uint64_t seed);

}  // namespace ringcomm
