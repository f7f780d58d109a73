// What PointToPointEngine does for MPI beside sends and receives: probes, messages taken by them, and cancel.
#include <utility>

#include "p2p/request.h"

namespace ringcomm {

std::optional<ProbedMessage> PointToPointEngine::probe(const Transfer& transfer, bool waits) {
    Request request(transfer);
    request.polls = !waits;
    post(request);
    if (waits) {
        wait(request);
    } else {
        poll(request);
    }
    if (!request.is_done()) return {};
    request.check_result();
    return ProbedMessage{request.message, request.taken};
}

void PointToPointEngine::take(Request& request, UnexpectedMessage message) {
    request.set_message(message.source, message.header);
    request.taken = ++taken_count_;
    taken_.emplace(request.taken, std::move(message));
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
