// Collectives by the copy engines of the GPUs, which take no multiprocessor from the program: all_gather, all_to_all
// and broadcast, from `copy_engine_bytes` on.
//
// Each rank reads the blocks of its peers, so that it writes no memory but its own, whatever they do. Before the copies
// a kernel of one block waits until all ranks have started the call: their blocks are complete. One behind the copies
// waits until all have read them. What is read lies at one location of a buffer of `comm.empty`, which all ranks have
// made: the kernels find a mismatch where that does not hold for a rank.
#include "cuda/group.h"

namespace ringcomm {

CopySource GpuGroup::copy_source(const PeerGroup& host, const CallRecord& call, const LaunchPlan& plan) const {
    const uint64_t least = host.tuning().copy_engine_bytes;
    if (!least || plan.with_tables) return {};
    const uint64_t block = plan.count * call.item, size = host.size, all = block * size;
    const std::byte* read = call.source;
    uint64_t bytes = all, stride = 0;
    switch (call.collective) {
        case RC_BROADCAST:
            bytes = block;
            if (host.rank != call.root) read = call.target;
            break;
        case RC_ALL_GATHER:
            bytes = block;
            if (call.source != call.target + host.rank * block) break;
            read = call.target;  // in place: each block lies where it is gathered
            bytes = all;
            stride = block;
            break;
        case RC_ALL_TO_ALL:
            if (call.source == call.target) return {};  // a rank would overwrite what its peers still read
            break;
        default: return {};
    }
    if ((call.collective == RC_BROADCAST ? block : all) < least) return {};
    const rc_gpu_buffer* const buffer = buffer_of(read, bytes);
    if (!buffer || !buffer->addresses) return {};
    const uint64_t offset = reinterpret_cast<uint64_t>(read) - buffer->begin;
    uint64_t digest = cuda::mix(cuda::mix(buffer->number, offset), block);
    digest = cuda::mix(cuda::mix(digest, stride), uint64_t(call.collective) << 32 | uint32_t(call.root));
    return {buffer->addresses, offset, stride, digest | 1};  // a barrier agrees on 0
}

uint64_t GpuGroup::copy(PeerGroup& host, const CallRecord& call, const CopySource& source, CUstream stream,
                        bool async) {
    await_last(host, stream);
    const uint64_t last = launched_.load();
    for (uint64_t number : {last + 1, last + 2})
        remember(infos_[number % std::size(infos_)], {number, signature_of(call, host.size), call.timeout, {}, true});
    try {
        const CUstream on = streams_->begin(stream, async, ended(last));
        launch_barrier(host, call.timeout, source.digest, last + 1, on);
        launched_.store(last + 1);
        copy_blocks(host.rank, host.size, call, source, on);
        launch_barrier(host, call.timeout, source.digest, last + 2, on);
        launched_.store(last + 2);
        streams_->end(last + 2, on);
    } catch (const Failure& failure) {
        launch_failed(host, call, failure);
    }
    if (asleep_.load()) wake();
    return last + 2;
}

void GpuGroup::copy_blocks(int rank, int size, const CallRecord& call, const CopySource& source, CUstream stream) {
    const uint64_t block = call.bytes();
    const auto queue = [&](uint64_t target, int peer, uint64_t offset) {
        const uint64_t from = source.addresses[peer] + source.offset + offset;
        const uint64_t to = reinterpret_cast<uint64_t>(call.target) + target;
        if (from != to) driver_.check(driver_.cuMemcpyAsync(to, from, block, stream), "cuMemcpyAsync");
    };
    if (call.collective == RC_BROADCAST) return queue(0, call.root, 0);
    for (int d = 0; d < size; ++d) {
        const int peer = (rank + d) % size;
        queue(peer * block, peer, call.collective == RC_ALL_TO_ALL ? rank * block : peer * source.stride);
    }
}

// Launches a kernel that ends once all ranks have launched theirs. `agreed`: what must be the same on all.
void GpuGroup::launch_barrier(PeerGroup& host, double timeout, uint64_t agreed, uint64_t number, CUstream stream) {
    CallRecord barrier{};
    barrier.collective = RC_BARRIER;
    barrier.dtype = RC_UINT8;
    barrier.op = RC_SUM;
    barrier.factor = 1;
    barrier.timeout = timeout;
    LaunchPlan plan = this->plan(barrier, host.size);
    plan.count = agreed;
    fill(host, barrier, plan, number);
    start(plan, stream);
}

}  // namespace ringcomm
