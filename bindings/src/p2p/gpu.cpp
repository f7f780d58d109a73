// What is launched for messages on GPUs, and what follows from packets.
#include "p2p/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm {

namespace {

constexpr size_t CHUNKS = 16;  // of a message in one launch, at most

}  // namespace

GpuTransfers::GpuTransfers(PointToPointEngine& engine) : engine_(engine), group_(engine.group_) {}

GpuTransfers::~GpuTransfers() = default;

void GpuTransfers::check_connected() const {
    if (!connected()) reject("the GPU of this rank is not connected for messages");
}

// A message moves on the caller's stream, unless that is the per-thread default stream. A receive for which the caller
// does not wait has a stream of the communicator, and so has what is sent later or waits for a receiver.
void GpuTransfers::prepare(Request& request) {
    const auto context = gpus_->current();
    const auto stream = static_cast<CUstream>(request.transfer.stream);
    if (gpus_->capturing(stream)) reject("messages of arrays on GPUs cannot be captured into a CUDA graph");
    const bool own = stream == STREAM_PER_THREAD || (request.transfer.async && !request.sends);
    if (own) request.gpu->begin = gpus_->record(stream);
    if (!own) request.gpu->stream = stream;
    request.gpu->batch = coalescing_;
}

CUstream GpuTransfers::stream_of(Request& request) {
    GpuRequest& gpu = *request.gpu;
    if (!gpu.stream) {
        gpu.stream = request.sends ? gpus_->send_stream(request.transfer.peer)
                                   : gpus_->receive_stream(gpu.batch ? GpuMessages::BATCHES : request.message.source);
    }
    gpus_->wait(gpu.stream, std::exchange(gpu.begin, nullptr));
    return gpu.stream;
}

// ---- Sends.

void GpuTransfers::send(Request& request) {
    if (request.transfer.peer == group_.rank) {
        const auto context = gpus_->current();
        const CUstream stream = stream_of(request);
        const GpuBuffer buffer = gpus_->memory(request.bytes);
        gpus_->copy(buffer.get(), request.data, request.bytes, stream);
        request.gpu->end = gpus_->record(stream);
        request.gpu->copies = true;
        own_[++own_count_] = {buffer, request.gpu->end};
        const PacketHeader header{PACKET_OWN, uint32_t(request.transfer.dtype), request.transfer.tag, request.bytes, 0,
                                  own_count_};
        engine_.match(group_.rank, header, nullptr);
        return engine_.complete(request);
    }
    Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
    if (endpoint.channel->on_this_host() && !std::exchange(peers_[endpoint.peer].arena_sent, true)) {
        const auto handle = reinterpret_cast<const std::byte*>(&gpus_->handle());
        engine_.send_packet(endpoint, {PACKET_ARENA, nullptr, 0, {}, 0, sizeof(ArenaHandle), handle});
    }
    if (request.bytes > gpus_->slot_bytes()) {
        keep_order();
        return announce(request);
    }
    staging_.push_back(&request);
    if (!coalescing_) launch_staging();
}

// Of a transfer for each of the requests.
uint64_t GpuTransfers::launch(const std::vector<cuda::MessageTransfer>& transfers,
                              const std::vector<Request*>& requests, CUstream stream) {
    const uint64_t launch = gpus_->launch(transfers, stream, engine_.timeout(*requests.front()));
    auto& launched = launched_[launch % cuda::MAX_LAUNCHES];
    launched.clear();
    for (size_t i = 0; i < transfers.size(); ++i) {
        launched.push_back({requests[i]->transfer, transfers[i].number, transfers[i].peer});
        requests[i]->gpu->launch = launch;
    }
    return launch;
}

// What the caller queues on its stream from now on does not wait for the message.
void GpuTransfers::leave_stream(GpuRequest& gpu) {
    if (!gpu.stream) return;
    const auto context = gpus_->current();
    gpu.begin = gpus_->record(std::exchange(gpu.stream, nullptr));
}

// Sends the RTS of a message that is in no slot.
void GpuTransfers::announce(Request& request) {
    if (request.transfer.async) leave_stream(*request.gpu);
    engine_.send_packet(engine_.endpoint_of(request.transfer.peer),
                        {PACKET_RTS, &request, 0, {}, GpuLocation{}.packed()});
}

// A request stays in the list until it is launched or announced: if that fails, fail() ends it.
void GpuTransfers::launch_staging() {
    const auto context = gpus_->current();
    while (!staging_.empty()) {
        gpus_->free_dropped();
        Request& first = *staging_.front();
        const bool at_once = gpus_->may_stage_at_once();
        if (!gpus_->has_room() || !gpus_->may_stage_early() || !(at_once || first.transfer.async)) {
            announce(first);
            staging_.pop_front();
            continue;
        }
        if (!at_once) leave_stream(*first.gpu);
        const CUstream stream = stream_of(first);
        std::vector<cuda::MessageTransfer> transfers;
        std::vector<Request*> requests;
        for (Request* request : staging_) {
            const bool fits = at_once ? gpus_->may_stage_at_once() : gpus_->may_stage_early();
            if (transfers.size() == cuda::TRANSFERS || !fits || stream_of(*request) != stream) break;
            transfers.push_back(gpus_->stage(request->data, request->bytes, request->transfer.peer, at_once));
            requests.push_back(request);
        }
        const uint64_t launch = this->launch(transfers, requests, stream);
        for (const cuda::MessageTransfer& transfer : transfers) {
            Request& request = *staging_.front();
            Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
            const auto staged = std::make_shared<Staged>(request);
            staged->stage = transfer;
            staged->launch = launch;
            const std::shared_ptr<Request> sent(staged, &staged->request);
            staged_[sent.get()] = staged;
            ++engine_.async_open_;  // a receiver in host memory needs more of this rank, which may make no calls
            engine_.note_buffered(endpoint, *sent);
            const uint64_t location = GpuLocation{transfer.slot, transfer.number}.packed();
            engine_.send_packet(endpoint, {PACKET_RTS, sent.get(), 0, sent, location});
            engine_.complete(request);
            staging_.pop_front();
        }
    }
}

// The answer to an RTS: the receiver wants chunks, or its memory is that of the host.
void GpuTransfers::send_data(Endpoint& endpoint, Request& request, const PacketHeader& cts) {
    if (cts.location) return chunking_.push_back(&request);
    if (request.bytes == 0) return engine_.send_packet(endpoint, {PACKET_DATA, &request, request.number});
    if (const auto found = staged_.find(&request); found != staged_.end()) {
        const Staged& staged = *found->second;
        outgoing_.push_back({&request, &endpoint, gpus_->slot(staged.stage.slot), staged.launch, nullptr});
        return;
    }
    const auto context = gpus_->current();
    outgoing_.push_back({&request, &endpoint, request.data, 0, begin_of(*request.gpu)});
    request.gpu->stream = gpus_->copies(GpuMessages::TO_HOST);  // if it fails, it ends after the copies
    request.gpu->copies = true;
}

void GpuTransfers::launch_chunks() {
    const auto context = gpus_->current();
    for (size_t at = 0; at < chunking_.size() && gpus_->free_slots() && gpus_->has_room();) {
        Request& request = *chunking_[at];
        Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
        const CUstream stream = stream_of(request);
        std::vector<cuda::MessageTransfer> transfers;
        while (request.moved < request.bytes && transfers.size() < CHUNKS && gpus_->free_slots()) {
            const size_t bytes = std::min(gpus_->slot_bytes(), request.bytes - request.moved);
            transfers.push_back(gpus_->stage(request.data + request.moved, bytes, endpoint.peer, true));
            request.moved += bytes;
        }
        if (request.bytes == 0) transfers.push_back(gpus_->stage(request.data, 0, endpoint.peer, true));
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

void GpuTransfers::free_slot(Request& request, bool fetched) {
    drop_outgoing(request);
    const auto found = staged_.find(&request);
    const Staged& staged = *found->second;
    if (fetched) {
        gpus_->release({staged.stage.slot, staged.stage.number}, staged.stage.peer);
    } else {
        gpus_->drop(staged.stage.slot, staged.launch);
    }
    staged_.erase(found);
    --engine_.async_open_;
}

// A peer that has closed receives nothing more.
void GpuTransfers::drop_unreceived() {
    for (auto each = staged_.begin(); each != staged_.end();) {
        Request& request = (each++)->second->request;
        Endpoint& endpoint = engine_.endpoint_of(request.transfer.peer);
        if (!group_.closed(endpoint.peer)) continue;
        engine_.drop_buffered(endpoint);
        std::erase(endpoint.rts_sent, &request);
        std::erase_if(endpoint.queue, [&](const PendingPacket& packet) { return packet.request == &request; });
        free_slot(request, false);
    }
}

// ---- Receives.

void GpuTransfers::answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header) {
    ArenaHandle from;
    const std::vector<std::byte>& arena = peers_[endpoint.peer].arena;
    const bool has_arena = arena.size() == sizeof from;
    if (has_arena) memcpy(&from, arena.data(), sizeof from);
    if (!(header.location & GpuLocation::ON_GPU) || !has_arena || !gpus_->open(endpoint.peer, from)) {
        const auto context = gpus_->current();
        incoming_.push_back({&request, begin_of(*request.gpu), &endpoint});
        return;
    }
    const GpuLocation at = GpuLocation::of(header.location);
    if (at.slot < 0) {
        engine_.send_packet(endpoint, {PACKET_CTS, &request, header.number, {}, GpuLocation::ON_GPU});
    } else {
        fetching_.push_back({&request, &endpoint, at, header.bytes, true});
    }
}

void GpuTransfers::handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload) {
    if (header.kind == PACKET_ARENA) return peers_[endpoint.peer].arena.assign(payload, payload + header.bytes);
    const GpuLocation at = GpuLocation::of(header.location);
    if (header.kind == PACKET_RELEASED) return gpus_->release(at, endpoint.peer);
    const auto found = find_numbered(endpoint.rts_received, header.number);
    if (found != endpoint.rts_received.end()) fetching_.push_back({*found, &endpoint, at, header.bytes, false});
}

void GpuTransfers::launch_fetches() {
    const auto context = gpus_->current();
    while (!fetching_.empty() && gpus_->has_room()) {
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
            transfers.push_back(
                gpus_->fetch(request.data + request.moved, fetch.bytes, fetch.endpoint->peer, fetch.at));
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
