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
GpuEvent GpuTransfers::begin_of(GpuRequest& gpu) {
    leave_stream(gpu);  // also if the caller waits: it adds nothing
    return std::exchange(gpu.begin, nullptr);
}

bool GpuTransfers::continue_copies() {
    if (outgoing_.empty() && incoming_.empty()) return false;
    const auto context = gpus_->current();
    bool moved = false;
    // Each stays in its list until it has been dealt with: if that fails, fail() ends it.
    for (auto at = outgoing_.begin(); at != outgoing_.end();) moved |= copy_to_host(*at++);
    for (auto at = incoming_.begin(); at != incoming_.end();) {
        const bool begun = receive_from_host(*at);
        at = begun ? incoming_.erase(at) : at + 1;
        moved |= begun;
    }
    return moved;
}

// Returns whether a chunk moved on: after the last one `outgoing` may be gone.
bool GpuTransfers::copy_to_host(Outgoing& outgoing) {
    if (outgoing.launch && !gpus_->ended(outgoing.launch)) return false;
    if (outgoing.begin && !gpus_->reached(outgoing.begin)) return false;
    Request& request = *outgoing.request;
    std::deque<Chunk>& chunks = outgoing.chunks;
    if (outgoing.sending && request.sendable.empty()) {
        chunks.pop_front();
        outgoing.sending = false;
    }
    while (outgoing.queued < request.bytes && chunks.size() < CHUNKS) {
        GpuBuffer memory = gpus_->chunk(GpuMessages::TO_HOST);
        if (!memory) break;
        const CUstream stream = gpus_->copies(GpuMessages::TO_HOST);
        const size_t bytes = std::min(gpus_->chunk_bytes(GpuMessages::TO_HOST), request.bytes - outgoing.queued);
        gpus_->copy(memory.get(), outgoing.source + outgoing.queued, bytes, stream);
        chunks.push_back({std::move(memory), gpus_->record(stream), bytes});
        outgoing.queued += bytes;
    }
    if (outgoing.sending || chunks.empty() || !gpus_->reached(chunks.front().copied)) return false;
    const Chunk& chunk = chunks.front();
    if (outgoing.endpoint) {
        outgoing.sending = true;
        request.sendable = {chunk.memory.get(), chunk.bytes};
        engine_.send_packet(*outgoing.endpoint, {PACKET_DATA, &request, request.number});
        return true;
    }
    memcpy(request.data + request.moved, chunk.memory.get(), chunk.bytes);
    request.moved += chunk.bytes;
    chunks.pop_front();
    if (request.moved < request.bytes) return true;
    drop_outgoing(request);
    engine_.complete(request);
    return true;
}

// The last chunk has been sent, or never will.
void GpuTransfers::drop_outgoing(const Request& request) {
    const auto found = std::ranges::find(outgoing_, &request, &Outgoing::request);
    if (found == outgoing_.end()) return;
    keep_chunks(*found);
    outgoing_.erase(found);
}

// Until they are copied, as the array of the message.
void GpuTransfers::keep_chunks(Outgoing& outgoing) {
    if (outgoing.chunks.empty()) return;
    const GpuEvent end = outgoing.chunks.back().copied;
    if (outgoing.memory) keep(std::move(outgoing.memory), end);
    if (GpuRequest* const gpu = outgoing.request->gpu) {
        gpu->end = end;
        gpu->copies = true;
    }
    for (Chunk& chunk : outgoing.chunks) keep(std::move(chunk.memory), std::move(chunk.copied));
}

bool GpuTransfers::receive_from_host(Incoming& incoming) {
    if (incoming.begin && !gpus_->reached(incoming.begin)) return false;
    Request& request = *incoming.request;
    if (incoming.endpoint) {
        engine_.send_packet(*incoming.endpoint, {PACKET_CTS, &request, request.number});
    } else {
        put(request, incoming.payload.data(), request.bytes);
        engine_.complete(request);
    }
    return true;
}

void GpuTransfers::receive(Request& request, const std::byte* payload) {
    const auto context = gpus_->current();
    incoming_.push_back({&request, nullptr, nullptr, {payload, payload + request.bytes}});
    incoming_.back().begin = begin_of(*request.gpu);
}

void GpuTransfers::put(Request& request, const std::byte* payload, size_t bytes) {
    const auto context = gpus_->current();
    const CUstream stream = gpus_->copies(GpuMessages::TO_GPU);
    request.gpu->stream = stream;
    request.gpu->copies = true;
    for (size_t done = 0; done < bytes;) {
        GpuBuffer memory = gpus_->chunk(GpuMessages::TO_GPU);
        if (!memory) {  // copies end soon
            yield_core();
            free_kept();
            continue;
        }
        const size_t length = std::min(gpus_->chunk_bytes(GpuMessages::TO_GPU), bytes - done);
        memcpy(memory.get(), payload + done, length);
        gpus_->copy(request.data + request.moved + done, memory.get(), length, stream);
        keep(std::move(memory), gpus_->record(stream));
        done += length;
    }
}

// A message of this rank to itself.
void GpuTransfers::receive_own(Request& request, const PacketHeader& header) {
    const auto [message, copied] = own_.extract(header.location).mapped();
    if (request.failure) {
        keep(message, copied);
        return engine_.complete(request);
    }
    if (!request.gpu && request.bytes > 0) {
        outgoing_.push_back({&request, nullptr, message.get(), 0, copied, message});
        return;
    }
    if (!request.gpu) return engine_.complete(request);
    const auto context = gpus_->current();
    const CUstream stream = stream_of(request);
    gpus_->wait(stream, copied);
    request.gpu->copies = true;
    request.gpu->buffer = message;
    gpus_->copy(request.data, message.get(), request.bytes, stream);
    engine_.complete(request);
}

}  // namespace ringcomm
