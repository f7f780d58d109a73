// The entry points that a host launches. Each compilation has one kernel, dtype and operation, chosen by number.
//
//   nvcc -std=c++20 -fmad=false -DRC_KERNEL=1 -DRC_DTYPE=11 -DRC_OP=0 -arch=sm_90 -I ../.. -cubin entry.cu
//
// -fmad=false: a contracted multiply-add would round once where the CPU rounds twice. Messages have neither dtype nor
// operation: -DRC_MESSAGES alone compiles them.
#include "kernels.cuh"
#include "messages.cuh"

using namespace ringcomm::cuda;

RC_DEVICE Ctx this_thread() { return {int(threadIdx.x), int(blockDim.x), int(blockIdx.x), int(gridDim.x)}; }

#ifdef RC_MESSAGES

extern "C" __global__ void __launch_bounds__(512, 1) ringcomm_messages(const __grid_constant__ MessageArgs args) {
    run_messages(this_thread(), args);
}

#else

using Entry = Arithmetic<TypeOf<RC_DTYPE>::type, RC_OP>;

extern "C" __global__ void __launch_bounds__(512, 1) ringcomm_kernel(const __grid_constant__ Args args) {
    run<RC_KERNEL, Entry>(this_thread(), args);
}

// Several ranks on one device: only the blocks of one cooperative launch are guaranteed to run concurrently.
extern "C" __global__ void __launch_bounds__(512, 1)
    ringcomm_virtual(const __grid_constant__ VirtualRanks ranks, int blocks) {
    run_virtual<RC_KERNEL, Entry>(this_thread(), ranks.of, blocks);
}

#endif
