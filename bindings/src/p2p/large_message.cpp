// How PointToPointEngine moves messages larger than half the ring: the rendezvous protocol, as in UCX and Open MPI.
//
//   sender                                          receiver
//   RTS: size, dtype, tag, maybe the address   →    matches a receive, then one of three:
//                                              ←    FIN: it has read the payload from the sender's memory (CMA)
//                                              ←    CTS: it needs the payload in packets
//   DATA, DATA, … until all bytes are sent     →
//                                              ←    NACK: the receive has another size or dtype
#include <algorithm>
#include <cstring>

#include "p2p/request.h"

namespace ringcomm {

namespace {

// The kernel pays per page of a CMA read, so only huge pages are read from another process: in 4 KiB pages, 16 MiB take
// 2.4 ms, against 1.1 ms in DATA packets (Zen 5, both ranks sending).
constexpr size_t MIN_CMA_BYTES = 256 << 10;
constexpr size_t CMA_READ_BYTES = 4 << 20;  // per read, under the lock; 1 MiB costs a tenth more

}  // namespace

// Fills in the header of a packet; returns its payload.
const std::byte* PointToPointEngine::prepare_rendezvous(Endpoint& endpoint, const Request& request,
                                                        PacketHeader& header) const {
    if (header.kind == PACKET_DATA) {
        header.bytes = std::min(endpoint.out.data_bytes(), request.bytes - request.moved);
        return request.transfer.data + request.moved;
    }
    if (header.kind == PACKET_RTS) {
        header.number = endpoint.rts_count + 1;
        if (offers_memory(endpoint.peer, request)) header.location = reinterpret_cast<uintptr_t>(request.transfer.data);
    }
    return nullptr;
}

void PointToPointEngine::rendezvous_written(Endpoint& endpoint, PendingPacket packet, size_t bytes) {
    Request& request = *packet.request;
    switch (packet.kind) {
        case PACKET_RTS:
            request.number = ++endpoint.rts_count;
            endpoint.rts_sent.push_back(&request);
            break;
        case PACKET_DATA:
            request.moved += bytes;
            if (request.moved < request.bytes) {
                endpoint.queue.push_back(packet);
            } else {
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

void PointToPointEngine::answer_rts(Request& request, const PacketHeader& header) {
    Endpoint& endpoint = endpoint_of(request.source);
    endpoint.rts_received.push_back(&request);
    if (request.failure) {
        send_packet(endpoint, {PACKET_NACK, &request, header.number});
    } else if (header.location && comm_.world->cma.available(comm_.group().members[request.source])) {
        request.address = header.location;
    } else {
        send_packet(endpoint, {PACKET_CTS, &request, header.number});
    }
}

void PointToPointEngine::handle_rendezvous(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload) {
    std::vector<Request*>& requests = header.kind == PACKET_DATA ? endpoint.rts_received : endpoint.rts_sent;
    const auto found = std::find_if(requests.begin(), requests.end(),
                                    [&](Request* request) { return request->number == header.number; });
    if (found == requests.end()) return;  // failed here: the communicator is broken
    Request& request = **found;
    if (header.kind == PACKET_CTS) return send_packet(endpoint, {PACKET_DATA, &request, header.number});
    if (header.kind == PACKET_DATA) {
        memcpy(request.transfer.data + request.moved, payload, header.bytes);
        request.moved += header.bytes;
        if (request.moved < request.bytes) return;
    }
    requests.erase(found);
    if (header.kind == PACKET_NACK) {
        const std::string call = request.describe_call();
        request.set_mismatch(endpoint.peer, format("rank %d expects another size or dtype than ", endpoint.peer) + call,
                             "", call);
    }
    complete(request);
}

// Whether the peer should read the payload from this rank's memory rather than get it in DATA packets. The page in the
// middle is taken for all.
bool PointToPointEngine::offers_memory(int peer, const Request& request) const {
    Cma& cma = comm_.world->cma;
    const rc_tuning& tuning = comm_.tuning();
    const std::byte* middle = request.transfer.data + request.bytes / 2;
    if (request.bytes >= tuning.direct_bytes && cma.same_process(comm_.group().members[peer])) return true;
    // The user's own cma_bytes holds for all pages.
    if (tuning.cma_bytes == tuning.cma_huge_bytes) return request.bytes >= tuning.cma_bytes && cma.readable(middle);
    return request.bytes >= MIN_CMA_BYTES && cma.in_huge_page(middle);
}

// Reads the next part of the first message that the peer offers in its memory.
bool PointToPointEngine::read_next(Endpoint& endpoint) {
    const auto found = std::find_if(endpoint.rts_received.begin(), endpoint.rts_received.end(),
                                    [](Request* request) { return request->address != 0; });
    if (found == endpoint.rts_received.end()) return false;
    Request& request = **found;
    Cma& cma = comm_.world->cma;
    const int member = comm_.group().members[endpoint.peer];
    const bool same_process = cma.same_process(member);
    const auto address = reinterpret_cast<const std::byte*>(request.address) + request.moved;
    const size_t length = std::min(CMA_READ_BYTES, request.bytes - request.moved);
    const auto read = [&](std::byte* target) {
        if (!same_process) return cma.read(member, target, address, length);
        memcpy(target, address, length);
        return true;
    };
    endpoint.in.set_copying(same_process);  // a thread keeps its memory during this copy; a process may not
    const bool done = memory_valid(endpoint.peer) && read(request.transfer.data + request.moved);
    endpoint.in.set_copying(false);
    if (!memory_valid(endpoint.peer)) return false;  // the next stop_reason() reports why
    request.moved += length;
    if (done && request.moved < request.bytes) return true;
    // If the peer is dead, its pid, and so the memory read, may belong to another process.
    if (comm_.world->liveness.dead(member)) return false;
    request.address = 0;
    if (!done) request.moved = 0;
    send_packet(endpoint, {done ? PACKET_FIN : PACKET_CTS, &request, request.number});
    return true;
}

// False once a sender may have released its buffer.
bool PointToPointEngine::memory_valid(int peer) const { return !comm_.has_failed() && !comm_.closed(peer); }

}  // namespace ringcomm
