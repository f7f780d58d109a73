// Messages between a GPU and host memory, also that of another host, and of a rank to itself.
//
// A message begins to move once the stream of its array has come to it, so that no copy waits for what the program
// does: then all share a few chunks of pinned memory.
#include <algorithm>
#include <cstring>
#include <utility>

#include "p2p/gpu.h"

namespace ringcomm {

namespace {

constexpr size_t CHUNKS = 3;  // of a message at once: one is sent, two are copied

}  // namespace

// What the array of a request waits for.
GpuEvent PointToPointEngine::Gpu::begin_of(GpuRequest& gpu) {
    leave_stream(gpu);  // also if the caller waits: it adds nothing
    return std::exchange(gpu.begin, nullptr);
}

bool PointToPointEngine::Gpu::continue_copies() {
    if (outgoing_.empty() && incoming_.empty()) return false;
    const auto context = gpus.current();
    bool moved = false;
    // Each stays in its list until it has been dealt with: if that fails, fail() ends it.
    for (auto at = outgoing_.begin(); at != outgoing_.end();)
        at = copy_to_host(*at, moved) ? outgoing_.erase(at) : at + 1;
    for (auto at = incoming_.begin(); at != incoming_.end();) {
        const bool begun = receive_from_host(*at);
        at = begun ? incoming_.erase(at) : at + 1;
        moved |= begun;
    }
    return moved;
}

// Returns whether the last chunk is there.
bool PointToPointEngine::Gpu::copy_to_host(Outgoing& outgoing, bool& moved) {
    if (outgoing.launch && !gpus.ended(outgoing.launch)) return false;
    if (outgoing.begin && !gpus.reached(outgoing.begin)) return false;
    Request& request = *outgoing.request;
    CopyToHost& copy = *request.to_host;
    while (copy.queued < request.bytes && copy.chunks.size() < CHUNKS) {
        GpuBuffer memory = gpus.chunk(GpuMessages::TO_HOST);
        if (!memory) break;
        const CUstream stream = gpus.copies(GpuMessages::TO_HOST);
        const size_t bytes = std::min(gpus.chunk_bytes(GpuMessages::TO_HOST), request.bytes - copy.queued);
        gpus.copy(memory.get(), outgoing.source + copy.queued, bytes, stream);
        copy.chunks.push_back({std::move(memory), gpus.record(stream), bytes});
        copy.queued += bytes;
    }
    const bool sending = copy.ready > copy.begin;
    if (sending || copy.chunks.empty() || !gpus.reached(copy.chunks.front().copied)) return false;
    moved = true;
    copy.ready = copy.begin + copy.chunks.front().bytes;
    const bool last = copy.ready == request.bytes;
    if (outgoing.endpoint) {  // the request may end with the packet
        engine_.send_packet(*outgoing.endpoint, {PACKET_DATA, &request, request.number});
        return last;
    }
    memcpy(request.data + copy.begin, copy.chunks.front().memory.get(), copy.chunks.front().bytes);
    chunk_sent(request);
    if (last) engine_.complete(request);
    return last;
}

void PointToPointEngine::Gpu::chunk_sent(Request& request) {
    request.to_host->chunks.pop_front();
    request.to_host->begin = request.to_host->ready;
}

bool PointToPointEngine::Gpu::receive_from_host(Incoming& incoming) {
    if (incoming.begin && !gpus.reached(incoming.begin)) return false;
    Request& request = *incoming.request;
    if (incoming.endpoint) {
        engine_.send_packet(*incoming.endpoint, {PACKET_CTS, &request, request.number});
    } else {
        put(request, incoming.payload.data(), request.bytes);
        engine_.complete(request);
    }
    return true;
}

void PointToPointEngine::Gpu::receive(Request& request, const std::byte* payload) {
    const auto context = gpus.current();
    incoming_.push_back({&request, nullptr, nullptr, {payload, payload + request.bytes}});
    incoming_.back().begin = begin_of(*request.gpu);
}

void PointToPointEngine::Gpu::put(Request& request, const std::byte* payload, size_t bytes) {
    const auto context = gpus.current();
    const CUstream stream = gpus.copies(GpuMessages::TO_GPU);
    request.gpu->stream = stream;
    request.gpu->copies = true;
    for (size_t done = 0; done < bytes;) {
        GpuBuffer memory = gpus.chunk(GpuMessages::TO_GPU);
        if (!memory) {  // copies end soon
            yield_core();
            free_kept();
            continue;
        }
        const size_t length = std::min(gpus.chunk_bytes(GpuMessages::TO_GPU), bytes - done);
        memcpy(memory.get(), payload + done, length);
        gpus.copy(request.data + request.moved + done, memory.get(), length, stream);
        keep(std::move(memory), gpus.record(stream));
        done += length;
    }
}

// A message of this rank to itself.
void PointToPointEngine::Gpu::receive_own(Request& request, const PacketHeader& header) {
    const auto [message, copied] = own_.extract(header.location).mapped();
    if (request.failure) {
        keep(message, copied);
        return engine_.complete(request);
    }
    if (!request.gpu && request.bytes > 0) {
        request.to_host = std::make_unique<CopyToHost>();
        return outgoing_.push_back({&request, nullptr, message.get(), 0, copied, message});
    }
    if (!request.gpu) return engine_.complete(request);
    const auto context = gpus.current();
    const CUstream stream = stream_of(request);
    gpus.wait(stream, copied);
    request.gpu->copies = true;
    request.gpu->buffer = message;
    gpus.copy(request.data, message.get(), request.bytes, stream);
    engine_.complete(request);
}

}  // namespace ringcomm
