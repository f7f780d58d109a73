// PostedReceives and UnexpectedMessages.
#include "p2p/matching.h"

#include <algorithm>
#include <utility>

namespace ringcomm {

bool PostedReceives::remove(const Request& request) {
    Bin<Request>& bin = this->bin(request);
    Request** const link = bin.find([&](const Request& each) { return &each == &request; });
    if (!*link) return false;
    bin.remove(link);
    --count_;
    return true;
}

Request* PostedReceives::take_first(int source, const PacketHeader& header) {
    const auto matches = [&](const Request& request) { return request.matches(source, header); };
    Bin<Request>& bin = exact_.of(source, header.tag);
    Request **const exact = bin.find(matches), **const any = any_.find(matches);
    if (!*exact && !*any) return nullptr;
    --count_;
    const bool takes_any = !*exact || (*any && (*any)->order < (*exact)->order);
    return takes_any ? &any_.remove(any) : &bin.remove(exact);
}

std::vector<Request*> PostedReceives::in_order() {
    std::vector<Request*> requests;
    if (count_ == 0) return requests;
    const auto visit = [&](Request& request) {
        requests.push_back(&request);
        return false;
    };
    exact_.for_each([&](Bin<Request>& bin) { bin.find(visit); });
    any_.find(visit);
    std::ranges::sort(requests, {}, &Request::order);
    return requests;
}

void PostedReceives::clear() {
    exact_.for_each([](Bin<Request>& bin) { bin.clear(); });
    any_.clear();
    count_ = 0;
}

void UnexpectedMessages::add(UnexpectedMessage message) {
    messages_.push_back(std::move(message));
    UnexpectedMessage& added = messages_.back();
    added.place = std::prev(messages_.end());
    bins_.of(added.source, added.header.tag).add(added);
}

UnexpectedMessage* UnexpectedMessages::find_first(const Request& receive) {
    const auto matches = [&](const UnexpectedMessage& message) {
        return receive.matches(message.source, message.header);
    };
    if (receive.transfer.peer >= 0 && !receive.any_tag()) {
        return *bins_.of(receive.transfer.peer, receive.transfer.tag).find(matches);
    }
    const auto found = std::ranges::find_if(messages_, matches);
    return found == messages_.end() ? nullptr : &*found;
}

UnexpectedMessage UnexpectedMessages::remove(UnexpectedMessage& message) {
    Bin<UnexpectedMessage>& bin = bins_.of(message.source, message.header.tag);
    bin.remove(bin.find([&](const UnexpectedMessage& each) { return &each == &message; }));
    UnexpectedMessage removed = std::move(message);
    messages_.erase(removed.place);
    return removed;
}

void UnexpectedMessages::clear() {
    bins_.for_each([](Bin<UnexpectedMessage>& bin) { bin.clear(); });
    messages_.clear();
}

}  // namespace ringcomm
