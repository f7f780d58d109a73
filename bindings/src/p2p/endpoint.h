// What the engine keeps of one peer: packets that wait for room, and large messages on the way.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "p2p/request.h"

namespace ringcomm {

struct PendingPacket {
    PacketKind kind;
    Request* request = nullptr;          // nullptr: the packet says all by itself
    uint64_t number = 0;                 // of the RTS that it answers
    std::shared_ptr<Request> owned{};    // the same request, of a buffered send
    uint64_t location = 0, bytes = 0;    // of the header, unless they are known only later
    const std::byte* payload = nullptr;  // of a packet without a request
};

struct Endpoint {
    int peer;
    std::unique_ptr<PacketChannel> channel;  // nullptr: the group has none to this peer
    std::deque<PendingPacket> queue{};       // waiting for room in the channel
    int buffered = 0;                        // packets in the queue that are buffered sends
    size_t buffered_bytes = 0;
    std::vector<Request*> rts_sent{};      // sends that are not known to have arrived
    std::vector<Request*> rts_received{};  // receives matched by an RTS
    uint64_t rts_count = 0;
    int posted = 0;        // receives and probes of its messages
    bool watched = false;  // each step looks at this peer
    bool closes = false;   // the peer has announced that it does

    bool has_pending() const { return posted || !queue.empty() || !rts_sent.empty() || !rts_received.empty(); }
};

// The request to which a packet belongs, by the number of its RTS; end(): it has failed here.
inline auto find_numbered(std::vector<Request*>& requests, uint64_t number) {
    return std::ranges::find_if(requests, [&](const Request* request) { return request->number == number; });
}

}  // namespace ringcomm
