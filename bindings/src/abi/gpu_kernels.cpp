// The C ABI of the CUDA kernels: launches on a GPU or on the emulated device.
#include "abi/check.h"
#include "core/errors.h"
#include "kernels/cuda/kernels.cuh"
#include "ringcomm.h"

using namespace ringcomm;

static_assert(sizeof(rc_cuda_shape) == sizeof(cuda::Shape) && sizeof(rc_cuda_control) == sizeof(cuda::Control));
static_assert(sizeof(cuda::VirtualRanks) == RC_VIRTUAL_RANKS * sizeof(cuda::Args));
static_assert(sizeof(rc_cuda_location) == sizeof(cuda::Location));
static_assert(offsetof(rc_cuda_control, number) ==
              offsetof(cuda::Control, failure) + offsetof(cuda::KernelFailure, call));
static_assert(offsetof(rc_cuda_control, reason) ==
              offsetof(cuda::Control, failure) + offsetof(cuda::KernelFailure, reason));
static_assert(offsetof(rc_cuda_control, completed) == offsetof(cuda::Control, completed));

namespace {

cuda::ArenaLayout layout_of(const rc_cuda_shape* shape) {
    check_pointer("shape", shape);
    const auto given = cuda::bits_as<cuda::Shape>(*shape);
    // So few that the sizes of all their parts fit into 64 bits.
    const auto few = [](int64_t number) { return number <= 4096; };
    if (!cuda::valid(given) || !few(given.ranks) || !few(given.channels) || !few(given.slots)) {
        reject("the shape of the CUDA arena is invalid");
    }
    return cuda::layout_of(given);
}

}  // namespace

int rc_cuda_layout(const rc_cuda_shape* shape, uint64_t* bytes, uint64_t* peers_at) {
    return guarded([&] {
        check_pointer("bytes", bytes);
        check_pointer("peers_at", peers_at);
        const cuda::DeviceArena arena{nullptr, layout_of(shape)};
        *bytes = arena.layout.bytes;
        *peers_at = reinterpret_cast<uint64_t>(arena.peers());
    });
}

uint64_t rc_cuda_args_bytes(void) { return sizeof(cuda::Args); }

int rc_cuda_args(const rc_cuda_shape* shape, const rc_cuda_call* call, void* args) {
    return guarded([&] {
        check_pointer("call", call);
        check_pointer("args", args);
        const cuda::Args filled{
            .arena = {static_cast<cuda::byte*>(call->arena), layout_of(shape)},
            .control = static_cast<cuda::Control*>(call->control),
            .input = static_cast<const cuda::byte*>(call->input),
            .output = static_cast<cuda::byte*>(call->output),
            .input_location = cuda::bits_as<cuda::Location>(call->input_location),
            .output_location = cuda::bits_as<cuda::Location>(call->output_location),
            .send_offsets = call->send_offsets,
            .recv_offsets = call->recv_offsets,
            .call = call->number,
            .timeout_ns = static_cast<uint64_t>(std::clamp(call->timeout, 0.0, 1e9) * 1e9),
            .rank = call->rank,
            .kernel = call->kernel,
            .dtype = call->dtype,
            .op = call->op,
            .root = call->root,
            .count = call->count,
            .factor = call->factor,
            .norm = {},
        };
        std::memcpy(args, &filled, sizeof filled);
    });
}
