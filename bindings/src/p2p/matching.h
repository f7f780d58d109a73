// Which receive gets which message: the first posted one that matches gets the first message that does, so messages of
// one rank do not overtake each other (MPI 4.1, section 3.5).
#pragma once

#include <list>
#include <vector>

#include "p2p/request.h"

namespace ringcomm {

// Receives and probes.
class PostedReceives {
public:
    void add(Request& request) { requests_.push_back(&request); }
    bool remove(const Request& request);  // false: it is not here
    // Removes the first that matches; nullptr: none does.
    Request* take(int source, const PacketHeader& header);
    const std::vector<Request*>& in_order() const { return requests_; }
    void clear() { requests_.clear(); }

private:
    std::vector<Request*> requests_;
};

struct UnexpectedMessage {
    int source;
    PacketHeader header;
    std::vector<std::byte> payload;
    Request* sender;  // of a synchronous send to this rank itself, which is done once this is received
};

class UnexpectedMessages {
public:
    void add(UnexpectedMessage message) { messages_.push_back(std::move(message)); }
    // The first that matches the receive; nullptr: none does.
    UnexpectedMessage* find(const Request& receive);
    UnexpectedMessage remove(UnexpectedMessage& message);
    const std::list<UnexpectedMessage>& in_order() const { return messages_; }
    void clear() { messages_.clear(); }

private:
    std::list<UnexpectedMessage> messages_;
};

}  // namespace ringcomm
