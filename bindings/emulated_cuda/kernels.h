// The CUDA kernels on the CPU, where every thread of every block is a real thread: for tests, and for machines without
// a GPU. Arenas may be in memory that processes share.
#pragma once

#include <span>

#include "kernels/cuda/kernels.cuh"
#include "kernels/cuda/messages.cuh"

namespace ringcomm {

namespace cuda {
// Why a launch with `blocks` blocks for each rank cannot run; null: it can.
const char* refusal(std::span<const Args> ranks, int blocks);
const char* refusal(const MessageArgs& args, int blocks);
}  // namespace cuda

// Runs one grid with `blocks` blocks for each rank, and returns when all have ended; args.control reports failures.
// `seed` not 0: threads yield at flags, as the seed decides.
void launch_emulated(std::span<const cuda::Args> ranks, int blocks, int threads, uint64_t seed);
void launch_emulated(const cuda::MessageArgs& args, int blocks, int threads, uint64_t seed);

}  // namespace ringcomm
