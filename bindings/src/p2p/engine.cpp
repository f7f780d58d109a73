// PointToPointEngine: its calls, and how it matches messages.
#include "p2p/engine.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "p2p/gpu.h"
#include "p2p/request.h"

namespace ringcomm {

PointToPointEngine::PointToPointEngine(PeerGroup& group) : group_(group), sleeper_(group.sleeper()) {
    for (int p = 0; p < group.size; ++p) {
        if (p == group.rank) continue;
        endpoints_.push_back({p, group.open_channel(p)});
        if (const auto& channel = endpoints_.back().channel) {
            least_eager_bytes_ = std::min(least_eager_bytes_, channel->eager_bytes);
        }
    }
    watched_.reserve(endpoints_.size());  // watch() must not fail
    group.drains->add(this, [this] { drain(); });
}

PointToPointEngine::~PointToPointEngine() { stop(); }

void PointToPointEngine::give_up_channels() {
    const std::lock_guard lock(mutex_);
    for (Endpoint& endpoint : endpoints_) endpoint.channel.reset();
}

rc_message PointToPointEngine::run(const rc_transfer& transfer) {
    Request request(transfer);
    post(request);
    wait(request);
    request.check_result();
    return request.message;
}

rc_message PointToPointEngine::exchange(const rc_transfer& outgoing, const rc_transfer& incoming) {
    Request received(incoming), sent(outgoing);
    Request* const both[] = {&received, &sent};
    post(both);
    wait(sent);
    wait(received);  // also if the send failed: no one may write to the target after this returns
    sent.check_result();
    received.check_result();
    return received.message;
}

std::shared_ptr<Work> PointToPointEngine::start(const rc_transfer& transfer) {
    const auto async = std::make_shared<AsyncRequest>(*this, transfer);
    post(async->request);
    return async;
}

std::shared_ptr<Work> PointToPointEngine::prepare(const rc_transfer& transfer) {
    const auto async = std::make_shared<AsyncRequest>(*this, transfer);
    async->finish();
    return async;
}

void PointToPointEngine::start_prepared(std::span<Work* const> works) {
    std::vector<Request*> requests;
    requests.reserve(works.size());
    for (Work* work : works) requests.push_back(&static_cast<AsyncRequest*>(work)->request);
    post(requests);
}

void PointToPointEngine::post(Request& request) {
    Request* const one[] = {&request};
    post(one);
}

// All are asynchronous, or none.
void PointToPointEngine::post(std::span<Request* const> requests) {
    group_.ensure_ready();
    for (Request* request : requests) {
        const int peer = request->transfer.peer;
        if (peer >= 0 && peer != group_.rank && !endpoint_of(peer).channel) {
            rejectf("rank %d and rank %d of this communicator cannot exchange messages", group_.rank, peer);
        }
        if (request->sends && group_.closed(peer)) group_.fail(*group_.peer_failure(peer, request->describe_call()));
    }
    const auto lock = lock_or_wait(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", group_.rank);
    for (const Request* request : requests) check_taken(*request);
    const bool async = requests.front()->owner;
    for (Request* request : requests) {
        if (!async) break;
        // Before anything else: it may throw.
        if (request->gpu && !gpu_) reject("the GPU of this rank is not connected for messages");
        if (needs_thread(*request)) start_progress_thread();
        if (request->gpu) gpu_->prepare(*request);
    }
    for (Request* request : requests) {
        if (!async) break;
        request->owner->open();
        ++async_open_;
        request->urgent = is_urgent(*request);
        urgent_open_ += request->urgent;
    }
    const uint64_t start = tick_ns(), traced = group_.trace() ? ticks() : 0;
    for (Request* request : requests) {
        request->start = start;
        request->traced = traced;
        if (request->polls) continue;  // it would fill the record
        group_.flight.count_bytes(request->transfer.kind == RC_RECV_OR_TAKE ? 0 : request->bytes);
        const auto tag = uint64_t(request->transfer.tag);
        request->flight = group_.flight.start(request->signature(), request->described_count(), tag, start);
    }
    try {
        for (Request* request : requests) begin(*request);
        if (!async) {
            progress();
        } else if (std::exchange(completed_, false) || !std::ranges::all_of(requests, &Request::is_done)) {
            sleeper_.wake();  // as progress() does
        }
    } catch (const std::exception& error) {  // out of memory: a half-posted request cannot be undone
        const Failure failure = break_group(error);
        for (Request* request : requests) {
            if (!request->is_done()) fail(*request, failure);
        }
        throw failure;
    }
    if (async_open_ == 0) return;
    const auto found_no_room = [](const Request* request) { return request->sends && !request->is_done(); };
    const bool holds_up = async && std::ranges::any_of(requests, found_no_room);
    if (holds_up || gpu_) try_start_progress_thread();  // gpu_: there may be copies of a send
    progress_thread_.note_activity(holds_up || urgent_open_.load() > 0);
}

void PointToPointEngine::begin(Request& request) {
    const rc_transfer& transfer = request.transfer;
    if (gpu_ && request.sends) {
        if (request.gpu) return gpu_->send(request);
        gpu_->keep_order();
    }
    if (request.sends && transfer.peer == group_.rank) {
        const bool synchronous = transfer.kind == RC_SEND_SYNCHRONOUS;
        match(group_.rank, {PACKET_EAGER, uint32_t(transfer.dtype), transfer.tag, request.bytes, 0, 0}, request.data,
              synchronous ? &request : nullptr);
        if (!synchronous) complete(request);
        return;
    }
    if (request.sends) {
        Endpoint& endpoint = endpoint_of(transfer.peer);
        flush_queue(endpoint);
        return send_packet(endpoint, {is_eager(request) ? PACKET_EAGER : PACKET_RTS, &request, 0});
    }
    if (transfer.taken) {
        const auto taken = taken_.extract(transfer.taken);
        const UnexpectedMessage& message = taken.mapped();
        return deliver(request, message.source, message.header, message.payload.data(), message.sender);
    }
    const auto found = find_unexpected(request);
    if (found == unexpected_.end()) return post_receive(request);
    if (transfer.kind == RC_PROBE) {
        request.set_message(found->source, found->header);
        return complete(request);
    }
    UnexpectedMessage message = std::move(*found);
    unexpected_.erase(found);
    if (request.takes(message.header)) return take(request, std::move(message));
    deliver(request, message.source, message.header, message.payload.data(), message.sender);
}

std::list<PointToPointEngine::UnexpectedMessage>::iterator PointToPointEngine::find_unexpected(const Request& request) {
    return std::find_if(unexpected_.begin(), unexpected_.end(), [&](const UnexpectedMessage& message) {
        return request.matches(message.source, message.header);
    });
}

void PointToPointEngine::post_receive(Request& request) {
    posted_receives_.push_back(&request);
    const int peer = request.transfer.peer;
    if (peer < 0) {
        ++posted_for_any_;
    } else if (peer != group_.rank) {
        ++endpoint_of(peer).posted;
        watch(endpoint_of(peer));
    }
}

void PointToPointEngine::forget_posted(const Request& request) {
    const int peer = request.transfer.peer;
    if (peer < 0) {
        --posted_for_any_;
    } else if (peer != group_.rank) {
        --endpoint_of(peer).posted;
    }
}

// Returns false if a message has matched the receive.
bool PointToPointEngine::withdraw(Request& request) {
    if (std::erase(posted_receives_, &request) == 0) return false;
    forget_posted(request);
    return true;
}

// Whether the request is done once its first packet is in the channel. An RTS is answered when it is matched, which a
// synchronous send has to know.
bool PointToPointEngine::is_eager(const Request& request) {
    const rc_transfer& transfer = request.transfer;
    if (request.gpu || transfer.kind != RC_SEND) return false;
    return transfer.peer == group_.rank || request.bytes <= endpoint_of(transfer.peer).channel->eager_bytes;
}

void PointToPointEngine::match(int source, const PacketHeader& header, const std::byte* payload, Request* sender) {
    // An eager send is complete already, so its payload is kept here until a receive matches.
    const auto kept = [&]() -> UnexpectedMessage {
        const size_t bytes = header.kind == PACKET_EAGER ? header.bytes : 0;
        return {source, header, {payload, payload + bytes}, sender};
    };
    for (auto at = posted_receives_.begin(); at != posted_receives_.end();) {
        Request& request = **at;
        if (!request.matches(source, header)) {
            ++at;
            continue;
        }
        at = posted_receives_.erase(at);
        forget_posted(request);
        if (request.takes(header)) return take(request, kept());
        if (request.transfer.kind != RC_PROBE) return deliver(request, source, header, payload, sender);
        request.set_message(source, header);
        complete(request);
    }
    unexpected_.push_back(kept());
}

void PointToPointEngine::deliver(Request& request, int source, const PacketHeader& header, const std::byte* payload,
                                 Request* sender) {
    request.set_message(source, header);
    request.number = header.number;
    const int kind = request.transfer.kind;
    const bool as_bytes = kind == RC_RECV_MESSAGE || kind == RC_RECV_OR_TAKE;
    const bool at_most = as_bytes || kind == RC_RECV_AT_MOST;
    const bool fits = (at_most ? header.bytes <= request.bytes : header.bytes == request.bytes) &&
                      (as_bytes || header.dtype == uint32_t(request.transfer.dtype));
    if (!fits) {
        const auto array = [&](int dtype, uint64_t bytes) {
            return as_bytes ? format("%" PRIu64 " bytes", bytes)
                            : format("%s x %" PRIu64, dtype_name(dtype), bytes / dtype_bytes(dtype));
        };
        const std::string sent = array(header.dtype, header.bytes);
        request.set_mismatch(source, format("rank %d sent %s, but ", source, sent.c_str()) + request.describe_call(),
                             (at_most ? "at most " : "") + array(request.transfer.dtype, request.bytes), sent);
    }
    request.bytes = header.bytes;
    if (kind == RC_RECV_OR_TAKE) group_.flight.count_bytes(request.bytes);
    if (header.kind == PACKET_EAGER) {
        const bool to_gpu = fits && request.gpu;
        if (to_gpu) {
            gpu_->receive(request, payload);
        } else if (fits) {
            output_stores_.copy(request.data, payload, request.bytes);
        }
        if (sender) complete(*sender);  // after the copy: the payload may be its own
        if (!to_gpu) complete(request);
        return;
    }
    answer_rts(request, header);
}

void PointToPointEngine::complete(Request& request) {
    const int status = request.failure ? request.failure->error.code : RC_OK;
    if (!request.polls) group_.flight.end(request.flight, status);
    if (Trace* trace = group_.trace(); trace && request.traced && !request.polls) {
        TraceEntry entry{request.traced_signature(), request.traced, ticks(), {}};
        entry.call = {request.traced_count(), 0, 0, 0, int16_t(-1), int8_t(status), request.async != nullptr, 0};
        trace->add(entry);
    }
    completed_ = true;
    const auto async = std::move(request.async);
    if (async) async->message = request.message;
    if (async && request.gpu && gpu_) {
        gpu_->finish(async);
    } else if (async) {
        --async_open_;
        urgent_open_ -= request.urgent;
        async->finish(request.failure ? std::make_unique<Failure>(*request.failure) : nullptr);
    }
    request.done.store(true, std::memory_order_release);  // last: the waiting thread may destroy the request
}

}  // namespace ringcomm
