// How PointToPointEngine moves packets: whose rings it looks at, and what it keeps for a peer that makes no room.
#include <utility>

#include "p2p/engine.h"

namespace ringcomm {

bool PointToPointEngine::visit_peers(Peers peers) {
    if (peers == Peers::EXPECTED && !posted_for_any_) return visit_watched();
    bool moved = false;
    for (Endpoint& endpoint : endpoints_) moved |= visit(endpoint);
    return moved;
}

// From now on each step looks at this peer, until nothing is pending there.
void PointToPointEngine::watch(Endpoint& endpoint) {
    if (!std::exchange(endpoint.watched, true)) watched_.push_back(&endpoint);
}

// Looks also at one of the others, in turn: it may have filled its ring with what nobody here has asked for yet.
bool PointToPointEngine::visit_watched() {
    if (endpoints_.empty()) return false;
    if (++turn_ >= endpoints_.size()) turn_ = 0;
    bool moved = !endpoints_[turn_].watched && visit(endpoints_[turn_]);
    for (size_t i = 0; i < watched_.size();) {
        Endpoint& endpoint = *watched_[i];
        moved |= visit(endpoint);
        if (endpoint.has_pending()) {
            ++i;
        } else {
            endpoint.watched = false;
            watched_.erase(watched_.begin() + ptrdiff_t(i));
        }
    }
    return moved;
}

bool PointToPointEngine::visit(Endpoint& endpoint) {
    if (!endpoint.channel) return false;
    if (endpoint.buffered && group_.closed(endpoint.peer)) drop_buffered(endpoint);
    bool moved = flush_queue(endpoint);
    moved |= receive_packets(endpoint);
    moved |= read_next(endpoint);
    return moved;
}

// Queued packets go first: packets keep their order, and large messages do not starve.
void PointToPointEngine::send_packet(Endpoint& endpoint, PendingPacket packet) {
    if (endpoint.queue.empty() && try_write(endpoint, packet)) return;
    endpoint.queue.push_back(std::move(packet));
    watch(endpoint);
    // Behind a buffered send no room is to be expected soon.
    if (endpoint.buffered) try_buffer(endpoint, endpoint.queue.back());
}

size_t PointToPointEngine::cost(const Request& request) {
    return sizeof(BufferedSend) + (request.data ? request.bytes : 0);  // nullptr: it lies elsewhere
}

// Completes a queued send whose receiver makes no room: from now on a copy is queued. Returns false if the send is not
// small, or too much is buffered already.
bool PointToPointEngine::try_buffer(Endpoint& endpoint, PendingPacket& packet) {
    if (stopping_ || group_.closing() || packet.kind != PACKET_EAGER) return false;
    Request& sent = *packet.request;
    if (sent.buffered || sent.bytes > MAX_BUFFERED_MESSAGE) return false;
    if (endpoint.buffered_bytes + cost(sent) > MAX_BUFFERED) return false;
    if (!try_start_progress_thread()) return false;
    const auto buffered = std::make_shared<BufferedSend>(sent);
    packet.owned = {buffered, &buffered->request};
    packet.request = packet.owned.get();
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
bool PointToPointEngine::try_write(Endpoint& endpoint, const PendingPacket& packet) {
    Request* const request = packet.request;
    PacketHeader header{packet.kind, 0, 0, packet.bytes, packet.number, packet.location};
    const std::byte* payload = nullptr;
    if (!request) return endpoint.channel->try_write(header, packet.payload);
    if (packet.kind == PACKET_EAGER || packet.kind == PACKET_RTS) {
        header.dtype = request->transfer.dtype;
        header.tag = request->transfer.tag;
        header.bytes = request->bytes;
    }
    if (packet.kind == PACKET_EAGER) {
        payload = request->data;
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

}  // namespace ringcomm
