// What is launched for messages on GPUs, and what follows from packets.
#include "p2p/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm {

namespace {

constexpr size_t CHUNKS = 16;  // of a message in one launch, at most

}  // namespace

PointToPointEngine::Gpu::Gpu(PointToPointEngine& engine, const Driver& driver, const rc_gpu_messages_setup& setup)
    : gpus(driver, setup, engine.group_.rank), engine_(engine), group_(engine.group_) {}

// A message moves on the caller's stream, unless that is the per-thread default stream. A receive for which the caller
// does not wait has a stream of the communicator, and so has what is sent later or waits for a receiver.
void PointToPointEngine::Gpu::prepare(Request& request) {
    const auto context = gpus.current();
    const auto stream = static_cast<CUstream>(request.transfer.stream);
    if (gpus.capturing(stream)) reject("messages of arrays on GPUs cannot be captured into a CUDA graph");
    const bool own = stream == STREAM_PER_THREAD || (request.transfer.async && !request.sends);
    if (own) request.gpu->begin = gpus.record(stream);
    if (!own) request.gpu->stream = stream;
    request.gpu->batch = coalescing_;
}

CUstream PointToPointEngine::Gpu::stream_of(Request& request) {
    GpuRequest& gpu = *request.gpu;
    if (!gpu.stream) {
        gpu.stream = request.sends ? gpus.send_stream(request.transfer.peer)
                                   : gpus.receive_stream(gpu.batch ? GpuMessages::BATCHES : request.message.source);
    }
    gpus.wait(gpu.stream, std::exchange(gpu.begin, nullptr));
    return gpu.stream;
}

// ---- Sends.

void PointToPointEngine::Gpu::send(Request& request) {
    if (request.transfer.peer == group_.rank) {
        const auto context = gpus.current();
        const CUstream stream = stream_of(request);
        const GpuBuffer buffer = gpus.memory(request.bytes);
        gpus.copy(buffer.get(), request.data, request.bytes, stream);
        request.gpu->end = gpus.record(stream);
        request.gpu->copies = true;
        own_[++own_count_] = {buffer, request.gpu->end};
        const PacketHeader header{PACKET_OWN, uint32_t(request.transfer.dtype), request.transfer.tag, request.bytes, 0,
                                  own_count_};
        engine_.match(group_.rank, header, nullptr);
        return engine_.complete(request);
    }
    Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
    if (endpoint.channel->on_this_host() && !std::exchange(endpoint.arena_sent, true))
        engine_.send_packet(endpoint, {PACKET_ARENA, nullptr, 0});
    if (request.bytes > gpus.slot_bytes()) {
        keep_order();
        return announce(request);
    }
    staging_.push_back(&request);
    if (!coalescing_) launch_staging();
}

// Of a transfer for each of the requests.
uint64_t PointToPointEngine::Gpu::launch(const std::vector<cuda::MessageTransfer>& transfers,
                                         const std::vector<Request*>& requests, CUstream stream) {
    const uint64_t launch = gpus.launch(transfers, stream, engine_.timeout(*requests.front()));
    auto& launched = launched_[launch % cuda::MAX_LAUNCHES];
    launched.clear();
    for (size_t i = 0; i < transfers.size(); ++i) {
        launched.push_back({requests[i]->transfer, transfers[i].number, transfers[i].peer});
        requests[i]->gpu->launch = launch;
    }
    return launch;
}

// What the caller queues on its stream from now on does not wait for the message.
void PointToPointEngine::Gpu::leave_stream(GpuRequest& gpu) {
    if (!gpu.stream) return;
    const auto context = gpus.current();
    gpu.begin = gpus.record(std::exchange(gpu.stream, nullptr));
}

// Sends the RTS of a message that is in no slot.
void PointToPointEngine::Gpu::announce(Request& request) {
    if (request.transfer.async) leave_stream(*request.gpu);
    request.location = GpuLocation{}.packed();
    engine_.send_packet(engine_.endpoint_of(request.transfer.peer), {PACKET_RTS, &request, 0});
}

// A request stays in the list until it is launched or announced: if that fails, fail() ends it.
void PointToPointEngine::Gpu::launch_staging() {
    const auto context = gpus.current();
    while (!staging_.empty()) {
        gpus.free_dropped();
        Request& first = *staging_.front();
        const bool at_once = gpus.may_stage_at_once();
        if (!gpus.has_room() || !gpus.may_stage_early() || !(at_once || first.transfer.async)) {
            announce(first);
            staging_.pop_front();
            continue;
        }
        if (!at_once) leave_stream(*first.gpu);
        const CUstream stream = stream_of(first);
        std::vector<cuda::MessageTransfer> transfers;
        std::vector<Request*> requests;
        for (Request* request : staging_) {
            const bool fits = at_once ? gpus.may_stage_at_once() : gpus.may_stage_early();
            if (transfers.size() == cuda::TRANSFERS || !fits || stream_of(*request) != stream) break;
            transfers.push_back(gpus.stage(request->data, request->bytes, request->transfer.peer, at_once));
            requests.push_back(request);
        }
        const uint64_t launch = this->launch(transfers, requests, stream);
        for (const cuda::MessageTransfer& transfer : transfers) {
            Request& request = *staging_.front();
            Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
            const auto sent = std::make_shared<BufferedSend>(request, nullptr);
            sent->request.location = GpuLocation{transfer.slot, transfer.number}.packed();
            staged_[&sent->request] = {sent, transfer, launch};
            ++engine_.async_open_;  // a receiver in host memory needs more of this rank, which may make no calls
            engine_.note_buffered(endpoint, sent->request);
            engine_.send_packet(endpoint, {PACKET_RTS, &sent->request, 0, sent});
            engine_.complete(request);
            staging_.pop_front();
        }
    }
}

// The answer to an RTS: the receiver wants chunks, or its memory is that of the host.
void PointToPointEngine::Gpu::continue_send(Endpoint& endpoint, Request& request, const PacketHeader& cts) {
    if (cts.location) return chunking_.push_back(&request);
    if (request.bytes == 0) return engine_.send_packet(endpoint, {PACKET_DATA, &request, request.number});
    request.to_host = std::make_unique<CopyToHost>();
    if (const auto staged = staged_.find(&request); staged != staged_.end()) {
        const std::byte* const slot = gpus.slot(staged->second.transfer.slot);
        return outgoing_.push_back({&request, &endpoint, slot, staged->second.launch, nullptr});
    }
    const auto context = gpus.current();
    outgoing_.push_back({&request, &endpoint, request.data, 0, begin_of(*request.gpu)});
    request.gpu->stream = gpus.copies(GpuMessages::TO_HOST);  // if it fails, it ends after the copies
    request.gpu->copies = true;
}

void PointToPointEngine::Gpu::launch_chunks() {
    const auto context = gpus.current();
    for (size_t at = 0; at < chunking_.size() && gpus.free_slots() && gpus.has_room();) {
        Request& request = *chunking_[at];
        Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
        const CUstream stream = stream_of(request);
        std::vector<cuda::MessageTransfer> transfers;
        while (request.moved < request.bytes && transfers.size() < CHUNKS && gpus.free_slots()) {
            const size_t bytes = std::min(gpus.slot_bytes(), request.bytes - request.moved);
            transfers.push_back(gpus.stage(request.data + request.moved, bytes, endpoint.peer, true));
            request.moved += bytes;
        }
        if (request.bytes == 0) transfers.push_back(gpus.stage(request.data, 0, endpoint.peer, true));
        launch(transfers, std::vector(transfers.size(), &request), stream);
        for (const cuda::MessageTransfer& each : transfers) {
            const uint64_t location = GpuLocation{each.slot, each.number}.packed();
            engine_.send_packet(endpoint, {PACKET_STAGED, nullptr, request.number, {}, location, each.bytes});
        }
        if (request.moved < request.bytes) continue;
        chunking_.erase(chunking_.begin() + at);
        std::erase(endpoint.rts_sent, &request);
        engine_.complete(request);
    }
}

void PointToPointEngine::Gpu::free_slot(Request& request, bool fetched) {
    const auto found = staged_.find(&request);
    const cuda::MessageTransfer& transfer = found->second.transfer;
    if (fetched) {
        gpus.release({transfer.slot, transfer.number}, transfer.peer);
    } else {
        gpus.drop(transfer.slot, found->second.launch);
    }
    staged_.erase(found);
    --engine_.async_open_;
}

// A peer that has closed receives nothing more.
void PointToPointEngine::Gpu::drop_unreceived() {
    for (Endpoint& endpoint : engine_.endpoints_) {
        if (!group_.closed(endpoint.peer)) continue;
        std::erase_if(endpoint.rts_sent, [&](Request* request) {
            if (!request->buffered) return false;
            std::erase_if(outgoing_, [&](const Outgoing& each) { return each.request == request; });
            std::erase_if(endpoint.queue, [&](const PendingPacket& packet) { return packet.request == request; });
            if (request->to_host)
                for (auto& chunk : request->to_host->chunks) keep(std::move(chunk.memory), std::move(chunk.copied));
            free_slot(*request, false);
            return true;
        });
    }
}

// ---- Receives.

void PointToPointEngine::Gpu::answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header) {
    ArenaHandle from;
    const bool has_arena = endpoint.arena.size() == sizeof from;
    if (has_arena) memcpy(&from, endpoint.arena.data(), sizeof from);
    if (!(header.location & GpuLocation::ON_GPU) || !has_arena || !gpus.open(endpoint.peer, from)) {
        const auto context = gpus.current();
        return incoming_.push_back({&request, begin_of(*request.gpu), &endpoint});
    }
    const GpuLocation at = GpuLocation::of(header.location);
    if (at.slot < 0) {
        engine_.send_packet(endpoint, {PACKET_CTS, &request, header.number, {}, GpuLocation::ON_GPU});
    } else {
        fetching_.push_back({&request, &endpoint, at, header.bytes, true});
    }
}

bool PointToPointEngine::Gpu::try_write(Endpoint& endpoint, PacketHeader header) {
    if (header.kind != PACKET_ARENA) return endpoint.channel->try_write(header, nullptr);
    header.bytes = sizeof(ArenaHandle);
    return endpoint.channel->try_write(header, reinterpret_cast<const std::byte*>(&gpus.handle()));
}

void PointToPointEngine::Gpu::handle(Endpoint& endpoint, const PacketHeader& header) {
    const GpuLocation at = GpuLocation::of(header.location);
    if (header.kind == PACKET_RELEASED) return gpus.release(at, endpoint.peer);
    const auto found = std::find_if(endpoint.rts_received.begin(), endpoint.rts_received.end(),
                                    [&](Request* request) { return request->number == header.number; });
    if (found != endpoint.rts_received.end()) fetching_.push_back({*found, &endpoint, at, header.bytes, false});
}

void PointToPointEngine::Gpu::launch_fetches() {
    const auto context = gpus.current();
    while (!fetching_.empty() && gpus.has_room()) {
        const CUstream stream = stream_of(*fetching_.front().request);
        std::vector<Fetch> batch;
        std::erase_if(fetching_, [&](const Fetch& fetch) {
            if (batch.size() == cuda::TRANSFERS || stream_of(*fetch.request) != stream) return false;
            batch.push_back(fetch);
            return true;
        });
        std::vector<cuda::MessageTransfer> transfers;
        std::vector<Request*> requests;
        for (const Fetch& fetch : batch) {
            Request& request = *fetch.request;
            requests.push_back(&request);
            transfers.push_back(gpus.fetch(request.data + request.moved, fetch.bytes, fetch.endpoint->peer, fetch.at));
            request.moved += fetch.bytes;
        }
        launch(transfers, requests, stream);
        for (const Fetch& fetch : batch) {
            Request& request = *fetch.request;
            if (fetch.whole) {
                engine_.send_packet(*fetch.endpoint, {PACKET_FIN, &request, request.number, {}, fetch.at.packed()});
                continue;
            }
            engine_.send_packet(*fetch.endpoint, {PACKET_RELEASED, nullptr, 0, {}, fetch.at.packed()});
            const bool last = std::none_of(batch.begin(), batch.end(), [&](const Fetch& other) {
                return other.request == &request && &other > &fetch;
            });
            if (request.moved < request.bytes || !last) continue;
            std::erase(fetch.endpoint->rts_received, &request);
            engine_.complete(request);
        }
    }
}

}  // namespace ringcomm
