// A launch of a kernel, as a step of a stream.
#pragma once

#include <vector>

#include "bindings/emulated_cuda/handles.h"
#include "bindings/emulated_cuda/kernels.h"
#include "bindings/emulated_cuda/streams.h"

namespace ringcomm::emulated {

struct KernelStep {
    std::vector<cuda::Args> ranks;  // one of ringcomm_kernel, several of ringcomm_virtual
    int blocks, threads;            // blocks: of each rank

    void operator()() const;
    const char* refusal() const;  // why this cannot run; null: it can
};

struct MessagesStep {
    cuda::MessageArgs args;
    int grid, threads;

    void operator()() const;
};

// The stream of a handle, or null.
std::shared_ptr<Stream> find_stream(CUstream handle);

// Adds a step to a stream, or to its capture.
CUresult add_step(Stream& stream, Step step);

}  // namespace ringcomm::emulated
