// PointToPointEngine: how it matches and moves messages.
#include "p2p/engine.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "p2p/gpu.h"
#include "p2p/request.h"

namespace ringcomm {

PointToPointEngine::PointToPointEngine(PeerGroup& group) : group_(group), sleeper_(group.sleeper()) {
    for (int p = 0; p < group.size; ++p) {
        if (p != group.rank) endpoints_.push_back({p, group.open_channel(p)});
    }
    group.drains->add(this, [this] { drain(); });
}

PointToPointEngine::~PointToPointEngine() { stop(); }

void PointToPointEngine::give_up_channels() {
    const std::lock_guard lock(mutex_);
    for (Endpoint& endpoint : endpoints_) endpoint.channel.reset();
}

rc_message PointToPointEngine::run(const Transfer& transfer) {
    Request request(transfer);
    post({&request});
    wait(request);
    request.check_result();
    return request.message;
}

rc_message PointToPointEngine::exchange(const Transfer& outgoing, const Transfer& incoming) {
    Request received(incoming), sent(outgoing);
    post({&received, &sent});
    wait(sent);
    wait(received);  // also if the send failed: no one may write to the target after this returns
    sent.check_result();
    received.check_result();
    return received.message;
}

ProbedMessage PointToPointEngine::receive_or_take(const Transfer& transfer) {
    Request request(transfer);
    post({&request});
    wait(request);
    request.check_result();
    return {request.message, request.taken};
}

std::shared_ptr<Work> PointToPointEngine::start(const Transfer& transfer) {
    const auto async = std::make_shared<AsyncRequest>(*this, transfer);
    post({&async->request}, async);
    return async;
}

void PointToPointEngine::post(std::initializer_list<Request*> requests, const std::shared_ptr<AsyncRequest>& async) {
    group_.ensure_ready();
    for (Request* request : requests) {
        const int peer = request->transfer.peer;
        if (peer >= 0 && peer != group_.rank && !endpoint_of(peer).channel) {
            rejectf("rank %d and rank %d of this communicator cannot exchange messages", group_.rank, peer);
        }
        if (request->sends && group_.closed(peer)) group_.fail(*group_.peer_failure(peer, request->describe_call()));
    }
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", group_.rank);
    for (const Request* request : requests) check_taken(*request);
    if (async && async->request.gpu && !gpu_) reject("the GPU of this rank is not connected for messages");
    if (async) {
        // Before anything else: it may throw.
        if (!is_eager(async->request)) start_progress_thread();
        if (async->request.gpu) gpu_->prepare(async->request);
        async->request.async = async;
        ++async_open_;
    }
    const uint64_t start = tick_ns(), traced = group_.trace() ? ticks() : 0;
    for (Request* request : requests) {
        request->start = start;
        request->traced = traced;
        if (request->polls) continue;  // it would fill the record
        group_.flight.count_bytes(request->transfer.kind == TransferKind::RECV_OR_TAKE ? 0 : request->bytes);
        request->flight = group_.flight.start(request->signature(), request->transfer.count, 0, start);
    }
    try {
        for (Request* request : requests) begin(*request);
        if (!async) {
            progress();
        } else if (std::exchange(completed_, false) || !async->request.is_done()) {
            sleeper_.wake();  // as progress() does
        }
    } catch (const std::exception& error) {  // out of memory: a half-posted request cannot be undone
        const Failure failure = break_group(error);
        for (Request* request : requests) {
            if (!request->is_done()) fail(*request, failure);
        }
        throw failure;
    }
    if (async_open_) {  // this one, or the copies of a send from a GPU
        try_start_progress_thread();
        progress_thread_.note_activity();
    }
}

// What cannot be undone has failed in the middle.
Failure PointToPointEngine::break_group(const std::exception& error) {
    const Failure failure(RC_SYSTEM, error.what(), group_.rank);
    group_.store_failure(failure);
    fail_all(failure);
    return failure;
}

void PointToPointEngine::begin(Request& request) {
    const Transfer& transfer = request.transfer;
    if (gpu_ && request.sends) {
        if (request.gpu) return gpu_->send(request);
        gpu_->keep_order();
    }
    if (request.sends && transfer.peer == group_.rank) {
        const bool synchronous = transfer.kind == TransferKind::SYNCHRONOUS_SEND;
        match(group_.rank, {PACKET_EAGER, uint32_t(transfer.dtype), transfer.tag, request.bytes, 0, 0}, transfer.data,
              synchronous ? &request : nullptr);
        if (!synchronous) complete(request);
        return;
    }
    if (request.sends) {
        Endpoint& endpoint = endpoint_of(transfer.peer);
        flush_queue(endpoint);
        return send_packet(endpoint, {is_eager(request) ? PACKET_EAGER : PACKET_RTS, &request, 0});
    }
    if (transfer.taken) {
        const auto taken = taken_.extract(transfer.taken);
        const UnexpectedMessage& message = taken.mapped();
        return deliver(request, message.source, message.header, message.payload.data(), message.sender);
    }
    const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const UnexpectedMessage& message) {
        return request.matches(message.source, message.header);
    });
    if (found == unexpected_.end()) return posted_receives_.push_back(&request);
    if (transfer.kind == TransferKind::PROBE) {
        request.set_message(found->source, found->header);
        return complete(request);
    }
    UnexpectedMessage message = std::move(*found);
    unexpected_.erase(found);
    if (request.takes(message.header)) return take(request, std::move(message));
    deliver(request, message.source, message.header, message.payload.data(), message.sender);
}

// Whether the request is done once its first packet is in the channel. An RTS is answered when it is matched, which a
// synchronous send has to know.
bool PointToPointEngine::is_eager(const Request& request) {
    const Transfer& transfer = request.transfer;
    if (request.gpu || transfer.kind != TransferKind::SEND) return false;
    return transfer.peer == group_.rank || request.bytes <= endpoint_of(transfer.peer).channel->eager_bytes;
}

// Moves one piece of each large message at a time, because the lock is held.
bool PointToPointEngine::progress() {
    bool moved = false;
    group_.progress();
    for (Endpoint& endpoint : endpoints_) {
        if (!endpoint.channel) continue;
        if (endpoint.buffered && group_.closed(endpoint.peer)) drop_buffered(endpoint);
        moved |= flush_queue(endpoint);
        moved |= receive_packets(endpoint);
        moved |= read_next(endpoint);
    }
    if (gpu_) moved |= gpu_->progress();
    // More may be ready to move, and no peer rings for that: make sleeping threads check again.
    if (std::exchange(completed_, false) || moved) sleeper_.wake();
    return moved;
}

// Queued packets go first: packets keep their order, and large messages do not starve.
void PointToPointEngine::send_packet(Endpoint& endpoint, PendingPacket packet) {
    if (endpoint.queue.empty() && try_write(endpoint, packet)) return;
    endpoint.queue.push_back(packet);
    // Behind a buffered send no room is to be expected soon.
    if (endpoint.buffered) try_buffer(endpoint, endpoint.queue.back());
}

size_t PointToPointEngine::cost(const Request& request) {
    return sizeof(BufferedSend) + (request.transfer.data ? request.bytes : 0);  // nullptr: staged on the GPU
}

// Completes a queued send whose receiver makes no room: from now on a copy is queued. Returns false if the send is not
// small, or too much is buffered already.
bool PointToPointEngine::try_buffer(Endpoint& endpoint, PendingPacket& packet) {
    if (stopping_ || group_.closing() || packet.kind != PACKET_EAGER) return false;
    Request& sent = *packet.request;
    if (sent.buffered || sent.bytes > MAX_BUFFERED_MESSAGE) return false;
    if (endpoint.buffered_bytes + cost(sent) > MAX_BUFFERED) return false;
    if (!try_start_progress_thread()) return false;
    packet.owned = std::make_shared<BufferedSend>(sent);
    packet.request = &packet.owned->request;
    note_buffered(endpoint, sent);
    progress_thread_.hurry();
    const bool wakes = completed_ || sent.async;  // nobody else waits for a blocking send: let it sleep
    complete(sent);
    completed_ = wakes;
    return true;
}

// A peer that has closed receives nothing more: like those in the ring, these messages end with it.
void PointToPointEngine::drop_buffered(Endpoint& endpoint) {
    std::erase_if(endpoint.queue, [&](const PendingPacket& packet) {
        if (packet.owned) forget_buffered(endpoint, *packet.request);
        if (packet.owned && packet.kind == PACKET_RTS && gpu_) gpu_->free_slot(*packet.request, false);
        return packet.owned != nullptr;
    });
}

void PointToPointEngine::note_buffered(Endpoint& endpoint, const Request& request) {
    ++endpoint.buffered;
    endpoint.buffered_bytes += cost(request);
    ++buffered_open_;
    ++async_open_;
}

void PointToPointEngine::forget_buffered(Endpoint& endpoint, const Request& request) {
    endpoint.buffered_bytes -= cost(request);
    --endpoint.buffered;
    --async_open_;
    completed_ |= --buffered_open_ == 0;  // flush() may wait for that
}

// Sends each queued packet at most once, so one piece of a large message.
bool PointToPointEngine::flush_queue(Endpoint& endpoint) {
    bool written = false;
    for (size_t left = endpoint.queue.size(); left && try_write(endpoint, endpoint.queue.front()); --left) {
        endpoint.queue.pop_front();
        written = true;
    }
    return written;
}

// Returns false if the channel has no room. A request that ends with this packet is complete only after the write: its
// caller may never make another call, and then no thread would write the packet.
bool PointToPointEngine::try_write(Endpoint& endpoint, PendingPacket packet) {
    Request* const request = packet.request;
    PacketHeader header{packet.kind, 0, 0, packet.bytes, packet.number, packet.location};
    const std::byte* payload = nullptr;
    if (packet.kind >= PACKET_ARENA) return gpu_->try_write(endpoint, header);
    if (packet.kind == PACKET_EAGER || packet.kind == PACKET_RTS) {
        header.dtype = request->transfer.dtype;
        header.tag = request->transfer.tag;
        header.bytes = request->bytes;
    }
    if (packet.kind == PACKET_EAGER) {
        payload = request->transfer.data;
    } else {
        payload = prepare_rendezvous(endpoint, *request, header);
    }
    if (!endpoint.channel->try_write(header, payload)) return false;
    if (packet.kind == PACKET_EAGER) {
        if (packet.owned) {
            forget_buffered(endpoint, *request);
        } else {
            complete(*request);
        }
    } else {
        if (packet.owned) forget_buffered(endpoint, *request);
        rendezvous_written(endpoint, packet, header.bytes);
    }
    return true;
}

// Stops where the channel says so: in shared memory after one piece of a large message.
bool PointToPointEngine::receive_packets(Endpoint& endpoint) {
    PacketChannel& channel = *endpoint.channel;
    bool read = false, stops = false;
    for (ReceivedPacket packet; !stops && (packet = channel.next()).header; read = true) {
        handle(endpoint, *packet.header, packet.payload);
        stops = channel.consume();
    }
    return read;
}

void PointToPointEngine::handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload) {
    if (header.kind == PACKET_EAGER || header.kind == PACKET_RTS) return match(endpoint.peer, header, payload);
    if (header.kind == PACKET_ARENA) return endpoint.arena.assign(payload, payload + header.bytes);
    if (header.kind > PACKET_ARENA) return gpu_->handle(endpoint, header);
    handle_rendezvous(endpoint, header, payload);
}

void PointToPointEngine::match(int source, const PacketHeader& header, const std::byte* payload, Request* sender) {
    // An eager send is complete already, so its payload is kept here until a receive matches.
    const auto kept = [&]() -> UnexpectedMessage {
        const size_t bytes = header.kind == PACKET_EAGER ? header.bytes : 0;
        return {source, header, {payload, payload + bytes}, sender};
    };
    for (auto at = posted_receives_.begin(); at != posted_receives_.end();) {
        Request& request = **at;
        if (!request.matches(source, header)) {
            ++at;
            continue;
        }
        at = posted_receives_.erase(at);
        if (request.takes(header)) return take(request, kept());
        if (request.transfer.kind != TransferKind::PROBE) return deliver(request, source, header, payload, sender);
        request.set_message(source, header);
        complete(request);
    }
    unexpected_.push_back(kept());
}

void PointToPointEngine::deliver(Request& request, int source, const PacketHeader& header, const std::byte* payload,
                                 Request* sender) {
    request.set_message(source, header);
    request.number = header.number;
    const TransferKind kind = request.transfer.kind;
    const bool as_bytes = kind == TransferKind::RECV_MESSAGE || kind == TransferKind::RECV_OR_TAKE;
    const bool at_most = as_bytes || kind == TransferKind::RECV_AT_MOST;
    const bool fits = (at_most ? header.bytes <= request.bytes : header.bytes == request.bytes) &&
                      (as_bytes || header.dtype == uint32_t(request.transfer.dtype));
    if (!fits) {
        const auto array = [&](int dtype, uint64_t bytes) {
            return as_bytes ? format("%" PRIu64 " bytes", bytes)
                            : format("%s x %" PRIu64, dtype_name(dtype), bytes / dtype_bytes(dtype));
        };
        const std::string sent = array(header.dtype, header.bytes);
        request.set_mismatch(source, format("rank %d sent %s, but ", source, sent.c_str()) + request.describe_call(),
                             (at_most ? "at most " : "") + array(request.transfer.dtype, request.bytes), sent);
    }
    request.bytes = header.bytes;
    if (kind == TransferKind::RECV_OR_TAKE) group_.flight.count_bytes(request.bytes);
    if (header.kind == PACKET_EAGER) {
        const bool to_gpu = fits && request.gpu;
        if (to_gpu) {
            gpu_->receive(request, payload);
        } else if (fits) {
            output_stores_.copy(request.transfer.data, payload, request.bytes);
        }
        if (sender) complete(*sender);  // after the copy: the payload may be its own
        if (!to_gpu) complete(request);
        return;
    }
    answer_rts(request, header);
}

void PointToPointEngine::complete(Request& request) {
    const int status = request.failure ? request.failure->error.code : RC_OK;
    if (!request.polls) group_.flight.end(request.flight, status);
    if (Trace* trace = group_.trace(); trace && request.traced && !request.polls) {
        TraceEntry entry{request.traced_signature(), request.traced, ticks(), {}};
        entry.call = {request.traced_count(), 0, 0, 0, int16_t(-1), int8_t(status), request.async != nullptr, 0};
        trace->add(entry);
    }
    completed_ = true;
    const auto async = std::move(request.async);
    if (async) async->message = request.message;
    if (async && request.gpu && gpu_) {
        gpu_->finish(async);
    } else if (async) {
        --async_open_;
        async->finish(request.failure ? std::make_unique<Failure>(*request.failure) : nullptr);
    }
    request.done.store(true, std::memory_order_release);  // last: the waiting thread may destroy the request
}

void PointToPointEngine::fail(Request& request, const Failure& failure) {
    request.failure = std::make_unique<Failure>(failure);
    complete(request);
}

}  // namespace ringcomm
