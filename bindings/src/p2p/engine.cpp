// PointToPointEngine: its calls, from start to end, and a step of its progress.
#include "p2p/engine.h"

#include <algorithm>
#include <utility>

#include "p2p/async_request.h"
#include "p2p/gpu.h"

namespace ringcomm {

PointToPointEngine::PointToPointEngine(PeerGroup& group)
    : group_(group), sleeper_(group.sleeper()), gpu_(std::make_unique<GpuTransfers>(*this)) {
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
    const auto async = transfer.on_gpu ? gpu_->make_request(transfer) : std::make_shared<AsyncRequest>(*this, transfer);
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
        if (request->gpu) gpu_->check_connected();
        if (request->gpu || needs_thread(*request)) start_progress_thread();
        if (request->gpu) gpu_->prepare(*request);
    }
    for (Request* request : requests) {
        if (!async) break;
        request->owner->open();
        ++async_open_;
        request->urgent = request->gpu || is_urgent(*request);
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
    if (holds_up || gpu_->connected()) try_start_progress_thread();  // it may have to copy what is sent
    progress_thread_.note_activity(holds_up || urgent_open_.load() > 0);
}

void PointToPointEngine::post_receive(Request& request) {
    posted_.add(request);
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
    if (!posted_.remove(request)) return false;
    forget_posted(request);
    return true;
}

// Whether the request is done once its first packet is in the channel. An RTS is answered when it is matched, which a
// synchronous send has to know.
bool PointToPointEngine::is_eager(const Request& request) {
    const rc_transfer& transfer = request.transfer;
    if (transfer.kind != RC_SEND) return false;
    return transfer.peer == group_.rank || request.bytes <= endpoint_of(transfer.peer).channel->eager_bytes;
}

// Moves one piece of each large message at a time, because the lock is held.
bool PointToPointEngine::progress(Peers peers) {
    group_.progress();
    const bool on_gpu = gpu_->connected();
    bool moved = visit_peers(on_gpu ? Peers::ALL : peers);
    if (on_gpu) moved |= gpu_->progress();
    // More may be ready to move, and no peer rings for that: make sleeping threads check again.
    if (std::exchange(completed_, false) || moved) sleeper_.wake();
    return moved;
}

// GPU completions wake no thread: while something is in flight there, a wait polls.
uint64_t PointToPointEngine::next_look(uint64_t deadline) const {
    constexpr uint64_t LOOK_NS = 100'000;
    return gpu_->busy() ? std::min(deadline, now_ns() + LOOK_NS) : deadline;
}

void PointToPointEngine::announce_close() {
    if (!group_.used()) return;  // it has sent nothing, and this would take memory
    group_.ensure_ready();
    const std::lock_guard lock(mutex_);
    if (stopping_ || gpu_->connected()) return;  // messages on a GPU may still have to be announced
    for (Endpoint& endpoint : endpoints_) {
        if (endpoint.channel && !group_.closed(endpoint.peer)) send_packet(endpoint, {PACKET_CLOSE});
    }
}

void PointToPointEngine::stop() {
    group_.drains->remove(this);
    {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        stopping_ = true;
        progress_thread_.stop();
    }
    progress_thread_.join();
    const std::lock_guard lock(mutex_);
    gpu_->drain();
    fail_all(Failure(RC_CLOSED, "this communicator was closed", group_.rank));
    gpu_->drain();
}

}  // namespace ringcomm
