// The life of a transfer: it begins, is matched, moves and ends. Here the ways of host memory, which the engine moves,
// and of GPUs, which GpuTransfers moves, part.
#include <cinttypes>
#include <utility>

#include "p2p/async_request.h"
#include "p2p/gpu.h"

namespace ringcomm {

void PointToPointEngine::begin(Request& request) {
    const rc_transfer& transfer = request.transfer;
    if (request.sends && gpu_->connected()) {
        if (request.gpu) return gpu_->send(request);
        gpu_->keep_order();
    }
    if (request.sends && transfer.peer == group_.rank) {
        const bool synchronous = transfer.kind == RC_SEND_SYNCHRONOUS;
        match(group_.rank, {PACKET_EAGER, uint32_t(transfer.dtype), transfer.tag, request.bytes, 0, 0}, request.data,
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
    UnexpectedMessage* const found = unexpected_.find(request);
    if (!found) return post_receive(request);
    if (transfer.kind == RC_PROBE) {
        request.set_message(found->source, found->header);
        return complete(request);
    }
    UnexpectedMessage message = unexpected_.remove(*found);
    if (request.takes(message.header)) return take(request, std::move(message));
    deliver(request, message.source, message.header, message.payload.data(), message.sender);
}

void PointToPointEngine::match(int source, const PacketHeader& header, const std::byte* payload, Request* sender) {
    // An eager send is complete already, so its payload is kept here until a receive matches.
    const auto kept = [&]() -> UnexpectedMessage {
        const size_t bytes = header.kind == PACKET_EAGER ? header.bytes : 0;
        return {source, header, {payload, payload + bytes}, sender};
    };
    while (Request* const request = posted_.take(source, header)) {
        forget_posted(*request);
        if (request->takes(header)) return take(*request, kept());
        if (request->transfer.kind != RC_PROBE) return deliver(*request, source, header, payload, sender);
        request->set_message(source, header);
        complete(*request);
    }
    unexpected_.add(kept());
}

void PointToPointEngine::deliver(Request& request, int source, const PacketHeader& header, const std::byte* payload,
                                 Request* sender) {
    request.set_message(source, header);
    request.number = header.number;
    const int kind = request.transfer.kind;
    const bool as_bytes = kind == RC_RECV_MESSAGE || kind == RC_RECV_OR_TAKE;
    const bool at_most = as_bytes || kind == RC_RECV_AT_MOST;
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
    if (kind == RC_RECV_OR_TAKE) group_.flight.count_bytes(request.bytes);
    const bool to_gpu = fits && request.gpu;
    if (header.kind == PACKET_OWN) return gpu_->receive_own(request, header);
    if (header.kind == PACKET_RTS) {
        Endpoint& endpoint = endpoint_of(source);
        endpoint.rts_received.push_back(&request);
        watch(endpoint);
        if (to_gpu) return gpu_->answer_rts(endpoint, request, header);
        PacketHeader announced = header;
        if (header.location & GpuLocation::ON_GPU) announced.location = 0;  // its data come in packets
        return answer_rts(endpoint, request, announced);
    }
    if (to_gpu) {
        gpu_->receive(request, payload);
    } else if (fits) {
        output_stores_.copy(request.data, payload, request.bytes);
    }
    if (sender) complete(*sender);  // after the copy: the payload may be its own
    if (!to_gpu) complete(request);
}

void PointToPointEngine::handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload) {
    switch (header.kind) {
        case PACKET_EAGER:
        case PACKET_RTS: return match(endpoint.peer, header, payload);
        case PACKET_CLOSE: endpoint.closes = true; return;
        case PACKET_CTS:
        case PACKET_NACK:
        case PACKET_FIN:
        case PACKET_DATA: return handle_rendezvous(endpoint, header, payload);
        default: return gpu_->handle(endpoint, header, payload);
    }
}

// After a CTS.
void PointToPointEngine::send_data(Endpoint& endpoint, Request& request, const PacketHeader& cts) {
    if (request.gpu) return gpu_->send_data(endpoint, request, cts);
    request.sendable = {request.data, request.bytes};
    send_packet(endpoint, {PACKET_DATA, &request, request.number});
}

void PointToPointEngine::receive_data(Request& request, const std::byte* payload, size_t bytes) {
    if (request.gpu) return gpu_->put(request, payload, bytes);
    output_stores_.copy(request.data + request.moved, payload, bytes);
}

void PointToPointEngine::complete(Request& request) {
    if (request.buffered) return gpu_->free_slot(request, request.location);  // it was complete when it was staged
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
    if (async && request.gpu) {
        gpu_->finish(async);
    } else if (async) {
        --async_open_;
        urgent_open_ -= request.urgent;
        async->finish(request.failure ? std::make_unique<Failure>(*request.failure) : nullptr);
    }
    request.done.store(true, std::memory_order_release);  // last: the waiting thread may destroy the request
}

}  // namespace ringcomm
