// How PointToPointEngine moves messages above PacketChannel::eager_bytes (half the ring, at most 128 KiB, in shared
// memory; 64 KiB between hosts), and synchronous ones: the rendezvous protocol, as in UCX and Open MPI.
//
//   sender                                          receiver
//   RTS: size, dtype, tag, maybe the location  →    matches a receive, then one of three:
//                                              ←    FIN: it has read the payload from the sender's memory, or drops it
//                                              ←    CTS: it needs the payload in packets
//   DATA, DATA, … until all bytes are sent     →
//                                              ←    NACK: the receive has another size or dtype
#include <algorithm>
#include <cstring>

#include "p2p/engine.h"

namespace ringcomm {

namespace {

constexpr size_t READ_BYTES = 4 << 20;  // of the sender's memory at once, under the lock; 1 MiB costs a tenth more

}  // namespace

// Fills in the header of a packet; returns its payload.
const std::byte* PointToPointEngine::prepare_rendezvous(Endpoint& endpoint, const Request& request,
                                                        PacketHeader& header) const {
    if (header.kind == PACKET_DATA) {
        about_to_wait();  // to copy so much takes long
        header.bytes = std::min(endpoint.channel->data_bytes, request.sendable.size());
        return request.sendable.data();
    }
    if (header.kind == PACKET_RTS) {
        header.number = endpoint.rts_count + 1;
        if (!header.location) header.location = endpoint.channel->offer_memory(request.data, request.bytes);
    }
    return nullptr;
}

void PointToPointEngine::rendezvous_written(Endpoint& endpoint, const PendingPacket& packet, size_t bytes) {
    Request& request = *packet.request;
    switch (packet.kind) {
        case PACKET_RTS:
            request.number = ++endpoint.rts_count;
            endpoint.rts_sent.push_back(&request);
            watch(endpoint);
            break;
        case PACKET_DATA:
            request.moved += bytes;
            request.sendable = request.sendable.subspan(bytes);
            if (!request.sendable.empty()) {
                endpoint.queue.push_back(packet);
            } else if (request.moved == request.bytes) {
                std::erase(endpoint.rts_sent, &request);
                complete(request);
            }
            break;
        case PACKET_FIN:
        case PACKET_NACK:
            std::erase(endpoint.rts_received, &request);
            complete(request);
            break;
        default: break;
    }
}

void PointToPointEngine::answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header) {
    if (request.failure) {
        // A message that is too long for its receive is no mistake of the sender.
        const PacketKind answer = request.transfer.kind == RC_RECV_MESSAGE ? PACKET_FIN : PACKET_NACK;
        send_packet(endpoint, {answer, &request, header.number});
    } else if (header.location && endpoint.channel->reads_memory(header.location)) {
        request.location = header.location;
    } else {
        send_packet(endpoint, {PACKET_CTS, &request, header.number});
    }
}

void PointToPointEngine::handle_rendezvous(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload) {
    std::vector<Request*>& requests = header.kind == PACKET_DATA ? endpoint.rts_received : endpoint.rts_sent;
    const auto found = find_numbered(requests, header.number);
    if (found == requests.end()) return;  // failed here: the communicator is broken
    Request& request = **found;
    if (header.kind == PACKET_CTS) return send_data(endpoint, request, header);
    if (header.kind == PACKET_DATA) {
        about_to_wait();
        receive_data(request, payload, header.bytes);
        request.moved += header.bytes;
        if (request.moved < request.bytes) return;
    }
    if (header.kind == PACKET_NACK) {
        const std::string call = request.describe_call();
        request.set_mismatch(endpoint.peer, format("rank %d expects another size or dtype than ", endpoint.peer) + call,
                             "", call);
    }
    if (header.kind == PACKET_FIN) request.location = header.location;
    requests.erase(found);
    complete(request);
}

// Reads the next part of the first message that the peer offers in its memory.
bool PointToPointEngine::read_next(Endpoint& endpoint) {
    const auto found = std::find_if(endpoint.rts_received.begin(), endpoint.rts_received.end(),
                                    [](Request* request) { return request->location != 0; });
    if (found == endpoint.rts_received.end()) return false;
    Request& request = **found;
    const size_t length = std::min(READ_BYTES, request.bytes - request.moved);
    about_to_wait();
    const PacketChannel::Read read =
        endpoint.channel->read_memory(request.data + request.moved, request.location + request.moved, length);
    if (read == PacketChannel::Read::PENDING) return false;
    const bool done = read == PacketChannel::Read::DONE;
    request.moved = done ? request.moved + length : 0;
    if (done && request.moved < request.bytes) return true;
    request.location = 0;
    send_packet(endpoint, {done ? PACKET_FIN : PACKET_CTS, &request, request.number});
    return true;
}

}  // namespace ringcomm
