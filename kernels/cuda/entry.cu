// The shells that a host launches: one kernel, dtype and operation for each compilation, chosen by their numbers.
//
//   nvcc -std=c++20 -fmad=false -DRC_KERNEL=1 -DRC_DTYPE=11 -DRC_OP=0 -arch=sm_90 -cubin entry.cu
//
// No multiply-add is contracted: it would round once where the CPU rounds twice.
#include "kernels.cuh"

using namespace ringcomm::cuda;

using Entry = Arithmetic<TypeOf<RC_DTYPE>::type, RC_OP>;

RC_DEVICE Ctx here() { return {int(threadIdx.x), int(blockDim.x), int(blockIdx.x), int(gridDim.x)}; }

extern "C" __global__ void __launch_bounds__(512, 1) ringcomm_kernel(const __grid_constant__ Args args) {
    run<RC_KERNEL, Entry>(here(), args);
}

// Several ranks on one device: only the blocks of one cooperative launch are sure to run at the same time.
extern "C" __global__ void __launch_bounds__(512, 1) ringcomm_virtual(const Args* ranks, int blocks) {
    run_virtual<RC_KERNEL, Entry>(here(), ranks, blocks);
}
