// How PointToPointEngine fails: what ends a request, and all of them.
#include <cctype>
#include <cstring>
#include <utility>

#include "p2p/async_request.h"
#include "p2p/gpu.h"

namespace ringcomm {

template <class Function>
void PointToPointEngine::for_each_open(Function function) {
    for (Request* request : posted_.in_order()) function(*request);
    const auto waits = [&](const UnexpectedMessage& message) {
        if (message.sender) function(*message.sender);
    };
    for (const UnexpectedMessage& message : unexpected_.in_order()) waits(message);
    for (const auto& [number, message] : taken_) waits(message);
    for (Endpoint& endpoint : endpoints_) {
        for (const PendingPacket& packet : endpoint.queue) {
            if (packet.kind == PACKET_EAGER || packet.kind == PACKET_RTS) function(*packet.request);
        }
        for (Request* request : endpoint.rts_sent) function(*request);
        for (Request* request : endpoint.rts_received) function(*request);
    }
}

// Returns the failure of a request that can no longer complete, or is past its deadline: first of the one that a thread
// waits for.
std::optional<Failure> PointToPointEngine::find_failure(const Request* waited_for) {
    std::optional<Failure> failure;
    const uint64_t now = now_ns();
    int checked = -1;  // a peer, which one buffered send stands for
    for_each_open([&](const Request& request) {
        if (request.buffered && std::exchange(checked, request.transfer.peer) == request.transfer.peer) return;
        if (failure && &request != waited_for) return;
        if (auto found = find_failure(request, now)) failure = std::move(found);
    });
    if (!failure && gpu_->busy()) failure = gpu_->find_failure();
    if (!failure && waited_for) failure = find_senders_closed(*waited_for);
    return failure;
}

Failure PointToPointEngine::all_closed(const Request& request) {
    return Failure(RC_PEER_LOST, "all other ranks closed the communicator during " + request.describe_call());
}

std::optional<Failure> PointToPointEngine::find_failure(const Request& request, uint64_t now) const {
    // -1: any, not matched yet
    const int peer = request.transfer.peer >= 0 ? request.transfer.peer : request.message.source;
    // progress() drops what is buffered, and a poll need not find a message.
    if (peer >= 0 && (request.buffered || request.polls) && group_.closed(peer)) return {};
    if (peer >= 0 && peer != group_.rank) {
        group_.hear_from(peer);
        if (auto failure = group_.peer_failure(peer, request.describe_call())) return failure;
    }
    bool possible = peer >= 0 || group_.size == 1 || request.polls;
    for (int p = 0; p < group_.size && peer < 0; ++p) {
        if (p == group_.rank || group_.closed(p)) continue;  // a rank that closed is not needed; a death is a failure
        group_.hear_from(p);
        if (auto failure = group_.peer_failure(p, request.describe_call())) return failure;
        possible = true;
    }
    if (!possible) return all_closed(request);
    if (request.buffered) return {};  // its call is over, and with it the timeout
    const double seconds = timeout(request);
    if (now < deadline_of(request.start, seconds)) return {};
    const std::string message = format("rank %d waited %.3g s for ", group_.rank, seconds) + request.describe_call();
    const std::vector<int> first = peer >= 0 ? std::vector{peer} : std::vector<int>{};
    return Failure(RC_TIMEOUT, group_.with_report(message, first), peer >= 0 ? peer : group_.rank);
}

bool PointToPointEngine::sends_no_more(int peer) const { return group_.closed(peer) || endpoint_of(peer).closes; }

// Of a receive or probe that a thread waits for: the program may still cancel any other one.
std::optional<Failure> PointToPointEngine::find_senders_closed(const Request& request) const {
    const int peer = request.transfer.peer;
    if (request.is_done() || request.sends || request.polls || request.message.source >= 0) return {};
    if (peer == group_.rank || group_.size == 1) return {};
    if (peer >= 0 && !sends_no_more(peer)) return {};
    if (peer >= 0) return group_.peer_lost(peer, "closed the communicator", request.describe_call());
    for (const Endpoint& endpoint : endpoints_) {
        if (!sends_no_more(endpoint.peer)) return {};
    }
    return all_closed(request);
}

double PointToPointEngine::timeout(const Request& request) const {
    return request.transfer.timeout < 0 ? group_.tuning().timeout : request.transfer.timeout;
}

// What cannot be undone has failed in the middle.
Failure PointToPointEngine::break_group(const std::exception& error) {
    const Failure failure(RC_SYSTEM, error.what(), group_.rank);
    group_.store_failure(failure);
    fail_all(failure);
    return failure;
}

// What ends all requests, as an error of this one. After a death an asynchronous one names its own call.
Failure PointToPointEngine::as_failure_of(const Request& request, const Failure& failure) {
    const rc_error& error = failure.error;
    const std::string call = request.describe_call();
    if (error.code == RC_CLOSED) return Failure(RC_CLOSED, "this communicator was closed during " + call, group_.rank);
    if (!request.owner || error.code != RC_PEER_LOST) return failure;
    if (!error.group_size && error.rank >= 0 && error.rank == request.transfer.peer) {
        if (auto lost = group_.peer_failure(error.rank, call)) return *lost;
    }
    const char* const named = strstr(error.message, call.c_str());
    if (named && !isdigit(named[call.size()])) return failure;  // "tag 1" is not in "tag 11"
    Failure own(failure);
    copy_text(own.error.message, sizeof own.error.message, call + " ended: " + error.message);
    return own;
}

void PointToPointEngine::fail(Request& request, const Failure& failure) {
    request.failure = std::make_unique<Failure>(as_failure_of(request, failure));
    complete(request);
}

// After the failure was stored, or this rank started closing.
void PointToPointEngine::fail_all(const Failure& failure, const Request* spared) {
    std::vector<Request*> open;
    for_each_open([&](Request& request) {
        if (&request != spared && !request.buffered) open.push_back(&request);
    });
    posted_.clear();
    posted_for_any_ = 0;
    unexpected_.clear();  // and with them the senders
    taken_.clear();
    for (Endpoint& endpoint : endpoints_) {
        if (endpoint.channel) endpoint.channel->end_access();
        drop_buffered(endpoint);
        endpoint.posted = 0;
        endpoint.queue.clear();
        endpoint.rts_sent.clear();
        endpoint.rts_received.clear();
    }
    if (gpu_->connected()) gpu_->fail(failure);
    for (Request* request : open) fail(*request, failure);
    sleeper_.wake();
}

}  // namespace ringcomm
