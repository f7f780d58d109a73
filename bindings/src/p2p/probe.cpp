// What PointToPointEngine does for MPI beside sends and receives: probes, messages taken by them, and cancel.
#include <utility>

#include "p2p/engine.h"

namespace ringcomm {

std::optional<rc_message> PointToPointEngine::poll(const rc_transfer& probe) {
    Request request(probe);
    request.polls = true;
    post(request);
    look(request);
    if (!request.is_done()) return {};
    request.check_result();
    return request.message;
}

void PointToPointEngine::take(Request& request, UnexpectedMessage message) {
    request.set_message(message.source, message.header);
    request.message.taken = ++taken_count_;
    taken_.emplace(taken_count_, std::move(message));
    complete(request);
}

void PointToPointEngine::check_taken(const Request& request) const {
    const uint64_t number = request.transfer.taken;
    if (number == 0) return;
    const auto found = taken_.find(number);
    if (found != taken_.end() && request.matches(found->second.source, found->second.header)) return;
    rejectf("there is no taken message %" PRIu64 " for %s: a message can be received once", number,
            request.describe_call().c_str());
}

bool PointToPointEngine::cancel(Request& request) {
    const std::lock_guard lock(mutex_);
    if (!withdraw(request)) return false;
    request.message.cancelled = 1;
    complete(request);
    sleeper_.wake();  // a thread that waits for it
    return true;
}

}  // namespace ringcomm
