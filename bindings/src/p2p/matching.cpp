// PostedReceives and UnexpectedMessages.
#include "p2p/matching.h"

#include <algorithm>
#include <utility>

namespace ringcomm {

bool PostedReceives::remove(const Request& request) { return std::erase(requests_, &request) > 0; }

Request* PostedReceives::take(int source, const PacketHeader& header) {
    const auto found =
        std::ranges::find_if(requests_, [&](const Request* each) { return each->matches(source, header); });
    if (found == requests_.end()) return nullptr;
    Request* const request = *found;
    requests_.erase(found);
    return request;
}

UnexpectedMessage* UnexpectedMessages::find(const Request& receive) {
    const auto found = std::ranges::find_if(
        messages_, [&](const UnexpectedMessage& message) { return receive.matches(message.source, message.header); });
    return found == messages_.end() ? nullptr : &*found;
}

UnexpectedMessage UnexpectedMessages::remove(UnexpectedMessage& message) {
    UnexpectedMessage removed = std::move(message);
    messages_.remove_if([&](const UnexpectedMessage& each) { return &each == &message; });
    return removed;
}

}  // namespace ringcomm
