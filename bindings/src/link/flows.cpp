// Flows: payloads queue up for all flows, and arrive on any.
#include "link/flows.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "core/waiting.h"
#include "link/frame.h"
#include "link/silence.h"

namespace ringcomm {

namespace {

// The payloads that one flow has at once. More keep a fast link busy; fewer leave less to wait for at the end, where
// one flow is slower than the others.
constexpr int MOST_ON_FLOW = 4;
constexpr double RECENT = 0.25;  // the weight of the last payload in the time of one

}  // namespace

void Flows::Payload::release_memory() {
    if (copy) return;  // it was canceled before
    copy = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
    std::copy_n(data, header.bytes, copy.get());
    data = copy.get();
}

// What a flow took long ago, perhaps when it was disturbed, does not count: it would never be used again.
bool Flows::Flow::known() const {
    constexpr uint64_t OLD_NS = 1'000'000'000;
    return payload_ns != 0 && (carries || now_ns() - free_at < OLD_NS);
}

void Flows::add(std::unique_ptr<ByteStream> stream) {
    flows_.emplace_back(std::move(stream));
    ++open_;
}

int Flows::descriptor(size_t flow) const { return flows_[flow].open() ? flows_[flow].stream->fd : -1; }

bool Flows::holds_received() const {
    for (size_t i = 0; i < flows_.size(); ++i) {
        if (flows_[i].open() && flows_[i].stream->holds_received() && !waits_for_header(i)) return true;
    }
    return false;
}

// --- Sending ---------------------------------------------------------------------------------------------------------

void Flows::send(const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    const auto [entry, _] = payloads_.try_emplace(sent_, sent_, data, bytes, &transfer);
    ++sent_;
    queue_.push_back(&entry->second);
}

void Flows::acknowledged(uint64_t number) {
    const auto found = payloads_.find(number);
    if (found == payloads_.end()) return;
    Payload& payload = found->second;
    for (Flow& flow : flows_) {
        if (payload.flow != &flow) continue;
        const uint64_t now = now_ns(), taken = now - flow.free_at;
        flow.payload_ns += (double(taken) - flow.payload_ns) * (flow.payload_ns == 0 ? 1 : RECENT);
        flow.free_at = now;
    }
    const auto sends = [&](const Flow& flow) { return flow.sending == &payload; };
    if (std::any_of(flows_.begin(), flows_.end(), sends)) {
        payload.acknowledged = true;
        payload.release_memory();
        payload.finish(LinkTransfer::DONE);
    } else {
        payload.finish(LinkTransfer::DONE);
        remove(payload);
    }
}

void Flows::remove(Payload& payload) {
    for (Flow& flow : flows_) flow.carries -= payload.flow == &flow;
    std::erase(queue_, &payload);  // if it was to be sent again
    payloads_.erase(payload.header.number);
}

// Whether a payload arrives no later over this flow than if the others carried it, after what is queued.
bool Flows::may_take(const Flow& flow) const {
    if (flow.sending || queue_.empty() || flow.carries >= MOST_ON_FLOW) return false;
    if (!flow.known()) return true;
    double rate = 0, ahead = queue_.size(), soonest = INFINITY;
    for (const Flow& other : flows_) {
        if (&other == &flow || !other.open()) continue;
        if (!other.known()) return true;
        rate += 1 / other.payload_ns;
        ahead += other.carries;
        soonest = std::min(soonest, (other.carries + 1) * other.payload_ns);
    }
    return (flow.carries + 1) * flow.payload_ns <= std::max(soonest, ahead / rate);
}

Flows::Payload* Flows::next(Flow& flow) {
    if (may_take(flow)) {
        if (!flow.carries) flow.free_at = now_ns();
        flow.sending = queue_.front();
        flow.sending->flow = &flow;
        flow.sent = 0;
        ++flow.carries;
        queue_.pop_front();
    }
    return flow.sending;
}

bool Flows::write(size_t number) {
    Flow& flow = flows_[number];
    size_t moved = 0;
    while (Payload* const payload = flow.open() && moved < PIECE ? next(flow) : nullptr) {
        constexpr size_t HEAD = sizeof(Header);
        const size_t head = HEAD - std::min(flow.sent, HEAD), at = flow.sent + head - HEAD;
        const iovec parts[]{{reinterpret_cast<std::byte*>(&payload->header) + HEAD - head, head},
                            {const_cast<std::byte*>(payload->data) + at, std::min(payload->header.bytes - at, PIECE)}};
        const ssize_t sent = flow.stream->write(parts);
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) {
            end(flow, strerror(errno));
            return true;
        }
        moved += sent;
        flow.sent += sent;
        if (size_t(sent) < parts[0].iov_len + parts[1].iov_len) break;  // there is no more room
        if (flow.sent == HEAD + payload->header.bytes) {
            flow.sending = nullptr;
            if (payload->acknowledged) remove(*payload);
        }
    }
    return moved > 0;
}

bool Flows::has_queued() const {
    return !queue_.empty() || std::any_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.sending; });
}

bool Flows::waits_for_room(size_t number) const {
    const Flow& flow = flows_[number];
    return flow.sending || may_take(flow);
}

// --- Receiving -------------------------------------------------------------------------------------------------------

void Flows::expect(std::shared_ptr<Receive> receive) { expected_.emplace(announced_++, std::move(receive)); }

bool Flows::waits_for_header(size_t number) const {
    const Flow& flow = flows_[number];
    return flow.held == sizeof flow.header && flow.header.number >= announced_;
}

// Finds the receive of a payload whose header has come; returns false where there is none yet.
bool Flows::begin(Flow& flow) {
    const auto [number, bytes, attempt] = flow.header;
    if (number >= announced_) return false;
    flow.arriving = std::make_shared<Receive>(Receive::OF_DROPPED, nullptr, bytes);
    flow.held = 0;
    const auto found = expected_.find(number);
    if (found == expected_.end()) return true;  // it has come over a flow that has ended since
    if (found->second->bytes != bytes) {
        end(flow, "sent another length than was announced");
        return false;
    }
    for (Flow& other : flows_) {
        if (other.arriving != found->second) continue;
        if (other.header.attempt > attempt) return true;
        end(other, "the peer has ended it");
    }
    flow.arriving = found->second;
    flow.arriving->arrived = 0;
    return true;
}

void Flows::finish(Flow& flow) {
    const auto receive = std::exchange(flow.arriving, nullptr);
    const auto found = expected_.find(flow.header.number);
    if (found == expected_.end() || found->second != receive) return;
    arrived_.push_back({flow.header.number, receive});
    expected_.erase(found);
}

bool Flows::read(size_t number) {
    Flow& flow = flows_[number];
    size_t moved = 0;
    while (flow.open() && moved < PIECE && (flow.held < sizeof flow.header || begin(flow))) {
        std::byte discarded[4096];
        iovec part{reinterpret_cast<std::byte*>(&flow.header) + flow.held, sizeof flow.header - flow.held};
        if (flow.arriving) {
            Receive& receive = *flow.arriving;
            part = receive.target ? iovec{receive.target + receive.arrived, std::min(receive.missing(), PIECE)}
                                  : iovec{discarded, std::min(receive.missing(), sizeof discarded)};
        }
        const ssize_t got = flow.stream->read({&part, 1});
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            end(flow, got ? strerror(errno) : "closed the connection");
            return true;
        }
        moved += got;
        if (!flow.arriving) {
            flow.held += got;
        } else {
            flow.arriving->arrived += got;
            if (flow.arriving->missing() == 0) finish(flow);
        }
        if (size_t(got) < part.iov_len) break;
    }
    return moved > 0;
}

// --- Ends ------------------------------------------------------------------------------------------------------------

void Flows::end(Flow& flow, const std::string& reason) {
    if (!flow.open()) return;
    flow.stream.reset();
    --open_;
    ended_.push_back(reason);
    flow.arriving = nullptr;  // it comes again
    flow.sending = nullptr;
    std::vector<Payload*> carried;
    for (auto& [_, payload] : payloads_) {
        if (payload.flow == &flow) carried.push_back(&payload);
    }
    for (Payload* payload : carried) {
        payload->flow = nullptr;
        if (payload->acknowledged) {
            remove(*payload);
        } else {
            ++payload->header.attempt;
            queue_.push_back(payload);
        }
    }
    std::sort(queue_.begin(), queue_.end(), [](const Payload* a, const Payload* b) {
        return a->header.number < b->header.number;  // what the peer awaits longest
    });
}

void Flows::end_if_silent(double idle_timeout, double resend_timeout) {
    for (Flow& flow : flows_) {
        if (flow.open() && silent(flow.stream->fd, idle_timeout, resend_timeout)) end(flow, strerror(ETIMEDOUT));
    }
}

std::vector<Flows::Orphan> Flows::take_orphans() {
    std::vector<Orphan> orphans;
    if (open_) return orphans;
    for (auto& [number, payload] : payloads_) {
        orphans.push_back({number, payload.data, payload.header.bytes, payload.transfer, std::move(payload.copy)});
    }
    payloads_.clear();
    queue_.clear();
    return orphans;
}

std::shared_ptr<Receive> Flows::take_expected(uint64_t number) {
    const auto found = expected_.find(number);
    if (found == expected_.end()) return nullptr;
    const auto receive = found->second;
    for (Flow& flow : flows_) {
        if (flow.arriving == receive) end(flow, "the peer has ended it");
    }
    receive->arrived = 0;
    expected_.erase(found);
    return receive;
}

void Flows::fail_sends() {
    for (auto& [_, payload] : payloads_) payload.finish(LinkTransfer::FAILED);
    for (Flow& flow : flows_) flow.sending = nullptr;
    payloads_.clear();
    queue_.clear();
}

void Flows::fail() {
    fail_sends();
    for (auto& [_, receive] : expected_) receive->finish(LinkTransfer::FAILED);
    expected_.clear();
    for (Flow& flow : flows_) flow.arriving = nullptr;
    for (Flow& flow : flows_) flow.stream.reset();
    open_ = 0;
}

void Flows::abandon() {
    for (Flow& flow : flows_) ringcomm::abandon(flow.stream);
}

}  // namespace ringcomm
