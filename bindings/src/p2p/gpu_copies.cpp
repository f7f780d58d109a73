// Messages between a GPU and host memory, and of a rank to itself.
#include "p2p/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm {

namespace {

constexpr size_t COPY_BYTES = 1 << 20;  // to the host at once, while the copy before is sent

}  // namespace

void PointToPointEngine::Gpu::put(Request& request, const std::byte* payload, size_t bytes) {
    GpuRequest& gpu = *request.gpu;
    const auto context = gpus.current();
    gpu.copies = true;
    if (!gpu.buffer) gpu.buffer = gpus.pinned(request.bytes);
    memcpy(gpu.buffer.get() + request.moved, payload, bytes);
    gpus.copy(request.transfer.data + request.moved, gpu.buffer.get() + request.moved, bytes, stream_of(request));
}

// Begins to copy a message to pinned memory.
void PointToPointEngine::Gpu::copy_to_host(Request& request, const std::byte* source) {
    GpuRequest& gpu = *request.gpu;
    const CUstream stream = gpus.receive_stream(GpuMessages::TO_HOST);
    gpu.buffer = gpus.pinned(request.bytes);
    for (size_t done = 0; done < request.bytes;) {
        const size_t bytes = std::min(COPY_BYTES, request.bytes - done);
        gpus.copy(gpu.buffer.get() + done, source + done, bytes, stream);
        gpu.copies_to_host.push_back({gpus.record(stream), bytes});
        done += bytes;
    }
}

bool PointToPointEngine::Gpu::continue_copies() {
    const auto context = gpus.current();
    bool moved = false;
    std::erase_if(copying_, [&](const auto& each) {
        auto& [endpoint, request] = each;
        const auto staged = staged_.find(request);
        if (staged != staged_.end() && !gpus.ended(staged->second.launch)) return false;
        if (!request->gpu) request->gpu = std::make_unique<GpuRequest>();
        GpuRequest& gpu = *request->gpu;
        if (!gpu.buffer) {
            const CUstream stream = gpus.receive_stream(GpuMessages::TO_HOST);
            if (gpu.stream) gpu.begin = gpus.record(gpu.stream);  // the caller waits there
            gpus.wait(stream, std::exchange(gpu.begin, nullptr));
            const bool in_block = staged != staged_.end();
            const auto block = in_block ? gpus.block(staged->second.transfer.block) : nullptr;
            copy_to_host(*request, in_block ? block : request->transfer.data);
        }
        for (; !gpu.copies_to_host.empty() && gpus.reached(gpu.copies_to_host.front().first); moved = true) {
            gpu.copied += gpu.copies_to_host.front().second;
            gpu.copies_to_host.pop_front();
        }
        const bool last = gpu.copied == request->bytes;  // the request may end with the packet
        if (request->moved < gpu.copied && !std::exchange(gpu.sending, true))
            engine_.send_packet(*endpoint, {PACKET_DATA, request, request->number});
        return last;
    });
    std::erase_if(arriving_, [&](Request* request) {
        if (!gpus.reached(request->gpu->end)) return false;
        memcpy(request->transfer.data, request->gpu->buffer.get(), request->bytes);
        engine_.complete(*request);
        return moved = true;
    });
    return moved;
}

// A message of this rank to itself.
void PointToPointEngine::Gpu::receive_own(Request& request, const PacketHeader& header) {
    const auto [message, copied] = own_.extract(header.location).mapped();
    if (request.failure) {
        keep(message, copied);
        return engine_.complete(request);
    }
    const auto context = gpus.current();
    const bool on_host = !request.gpu;
    if (on_host) request.gpu = std::make_unique<GpuRequest>();
    GpuRequest& gpu = *request.gpu;
    if (on_host) gpu.stream = gpus.receive_stream(GpuMessages::TO_HOST);
    const CUstream stream = stream_of(request);
    gpus.wait(stream, copied);
    gpu.copies = true;
    gpu.buffer = on_host ? gpus.pinned(request.bytes) : message;
    gpus.copy(on_host ? gpu.buffer.get() : request.transfer.data, message.get(), request.bytes, stream);
    if (!on_host) return engine_.complete(request);
    gpu.end = gpus.record(stream);
    gpu.source = message;
    arriving_.push_back(&request);
}

}  // namespace ringcomm
