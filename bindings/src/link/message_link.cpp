// MessageLink: messages tested until they are done.
#include "link/message_link.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "core/errors.h"
#include "core/waiting.h"

namespace ringcomm {

namespace {

constexpr uint64_t PACKETS = 0;                // the tag of packets
constexpr uint64_t CANCEL_NS = 1'000'000'000;  // how long cancel() waits, for all transfers in a row
constexpr uint64_t ROW_NS = 100'000'000;       // at most between two transfers in a row
constexpr uint64_t DROP_NS = 10'000'000'000;   // the peers have failed long before

}  // namespace

// A message in flight.
struct MessageLink::Operation {
    LinkTransfer* transfer;  // nullptr: nobody waits for it
    int peer;                // -1: any
    bool sends;
    std::unique_ptr<std::byte[]> memory;  // nullptr: the caller's
    size_t queued = 0;                    // bytes of a packet
    uint64_t request = 0;
    bool canceled = false;

    void finish(LinkTransfer::State state) { LinkTransfer::end(transfer, state); }
};

// Before each packet. Without one, the peer has left.
struct MessageLink::PacketPrefix {
    uint32_t source, bytes;
};

MessageLink::MessageLink(int rank, int size, std::unique_ptr<MessageLibrary> library)
    : Link(rank, size), library_(std::move(library)), peers_(size) {}

MessageLink::~MessageLink() {  // the library may still use the memory of what is in flight
    for (Arriving& packet : arriving_) {
        library_->forget(packet.request);
        (void)packet.memory.release();
    }
    for (auto& operation : operations_) library_->forget(operation.release()->request);
}

// --- Messages --------------------------------------------------------------------------------------------------------

MessageLink::Operation* MessageLink::begin(Operation operation, const std::byte* data, size_t bytes, uint64_t tag) {
    const int peer = operation.peer;
    if (peers_[peer].lost) {
        operation.finish(LinkTransfer::FAILED);
        return nullptr;
    }
    auto begun = std::make_unique<Operation>(std::move(operation));
    const int status = begun->sends ? library_->send(data, bytes, peer, tag, begun->request)
                                    : library_->receive(const_cast<std::byte*>(data), bytes, peer, tag, begun->request);
    if (status) {
        begun->finish(LinkTransfer::FAILED);
        lose(peer, status);
        return nullptr;
    }
    if (begun->transfer) begun->transfer->handle = begun.get();
    return operations_.emplace_back(std::move(begun)).get();
}

void MessageLink::send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != 0 && peer != rank);
    transfer.state = LinkTransfer::ACTIVE;
    begin({&transfer, peer, true, nullptr}, data, bytes, tag);
}

void MessageLink::receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != 0 && peer != rank);
    const auto matches = [&](const Dropped& each) { return each.tag == tag; };
    const bool dropped = std::any_of(dropped_.begin(), dropped_.end(), matches);
    transfer.state = dropped ? LinkTransfer::FAILED : LinkTransfer::ACTIVE;
    if (!dropped) begin({&transfer, peer, false, nullptr}, data, bytes, tag);
}

void MessageLink::send_packet(int peer, std::span<const std::byte> packet) {
    assert(packet.size() <= MAX_PACKET && peer != rank);
    const PacketPrefix prefix{uint32_t(rank), uint32_t(packet.size())};
    auto message = std::make_unique_for_overwrite<std::byte[]>(sizeof prefix + packet.size());
    std::memcpy(message.get(), &prefix, sizeof prefix);
    std::copy(packet.begin(), packet.end(), message.get() + sizeof prefix);
    const std::byte* const data = message.get();
    const size_t bytes = sizeof prefix + packet.size();
    Operation* const sent = begin({nullptr, peer, true, std::move(message), bytes}, data, bytes, PACKETS);
    if (!sent) return;
    peers_[peer].queued += bytes;
    if (test(*sent)) operations_.pop_back();  // the library has copied it
}

void MessageLink::leave() {
    if (std::exchange(left_, true)) return;
    for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) send_packet(peer, {});
    }
}

rc_leaving MessageLink::leaving() const {
    rc_leaving now{0, int(!dropped_.empty()), stuck(), failed_};
    for (int peer = 0; peer < size; ++peer) now.staying += peer != rank && !peers_[peer].left;
    for (const auto& each : operations_) {
        if (!each->sends || each->canceled) continue;
        ++(peers_[each->peer].left ? now.staying : now.unsent);  // who has left does not need it
    }
    return now;
}

// --- Canceling -------------------------------------------------------------------------------------------------------

void MessageLink::cancel(LinkTransfer& transfer) {
    if (transfer.ended()) return;
    Operation& operation = *static_cast<Operation*>(transfer.handle);
    operation.finish(LinkTransfer::FAILED);
    operation.canceled = true;
    if (!operation.sends) library_->cancel(operation.request);
    // A failed call cancels its transfers in a row, another one later its own.
    if (const uint64_t now = now_ns(); now >= cancel_waited_ + ROW_NS) cancel_deadline_ = now + CANCEL_NS;
    while (!test(operation)) {
        library_->progress();
        receive_dropped();
        cancel_waited_ = now_ns();
        if (cancel_waited_ >= cancel_deadline_) return;  // it stays among the operations
        yield_core();
    }
    std::erase_if(operations_, [&](const auto& each) { return each.get() == &operation; });
}

bool MessageLink::stuck() const {
    return std::any_of(operations_.begin(), operations_.end(), [](const auto& each) { return each->canceled; });
}

void MessageLink::drop(uint64_t tag) {
    failed_ = true;
    dropped_.push_back({tag, now_ns() + DROP_NS});
}

// Receives what peers still send with a dropped tag: their sends end, and the library does not keep them for ever.
bool MessageLink::receive_dropped() {
    if (dropped_.empty()) return false;
    bool moved = false;
    for (const Dropped& each : dropped_) {
        for (;;) {
            MessageLibrary::Probed probed;
            if (library_->probe(each.tag, probed) || !probed.found) break;
            auto operation = std::make_unique<Operation>(Operation{nullptr, probed.peer, false, nullptr});
            operation->memory = std::make_unique_for_overwrite<std::byte[]>(std::max<size_t>(probed.bytes, 1));
            moved = true;
            std::byte* const memory = operation->memory.get();
            if (library_->receive_probed(memory, probed.bytes, probed.message, operation->request)) break;
            operations_.push_back(std::move(operation));
        }
    }
    const uint64_t now = now_ns();
    std::erase_if(dropped_, [&](const Dropped& each) { return now >= each.until; });
    return moved;
}

// --- Progress --------------------------------------------------------------------------------------------------------

bool MessageLink::progress(LinkEvents& events) {
    bool moved = library_->progress();
    moved |= receive_packets(events);
    moved |= test_operations();
    moved |= receive_dropped();
    lose_peers();
    for (const int peer : std::exchange(lost_, {})) {
        moved = true;
        const auto fails = [&](const auto& each) { return each->peer == peer && each->transfer; };
        for (auto at = operations_.begin();
             (at = std::find_if(operations_.begin(), operations_.end(), fails)) != operations_.end();) {
            cancel(*(*at)->transfer);
        }
        events.peer_lost(peer, peers_[peer].failure);
    }
    return moved;
}

// Receives from any source, posted before, would save the search; a job of MPICH on two hosts has stalled with them.
bool MessageLink::receive_packets(LinkEvents& events) {
    bool moved = false;
    for (;;) {
        MessageLibrary::Probed probed;
        int status = library_->probe(PACKETS, probed);
        if (status == 0 && !probed.found) break;
        if (status == 0) {
            Arriving packet{probed.peer, std::make_unique_for_overwrite<std::byte[]>(probed.bytes)};
            status = library_->receive_probed(packet.memory.get(), probed.bytes, probed.message, packet.request);
            if (status == 0) arriving_.push_back(std::move(packet));
        }
        if (status) {
            lose(probed.peer, status);
            return true;
        }
    }
    while (!arriving_.empty()) {
        bool done = false;
        const int status = library_->test(arriving_.front().request, done);
        if (!done && status == 0) break;
        const Arriving packet = std::move(arriving_.front());
        arriving_.pop_front();
        moved = true;
        if (status) {
            lose(packet.peer, status);
            continue;
        }
        PacketPrefix prefix;
        std::memcpy(&prefix, packet.memory.get(), sizeof prefix);
        if (prefix.bytes == 0) {
            peers_[prefix.source].left = true;
        } else {
            events.packet_arrived(int(prefix.source), {packet.memory.get() + sizeof prefix, prefix.bytes});
        }
    }
    return moved;
}

bool MessageLink::test_operations() {
    bool moved = false;
    for (size_t i = 0; i < operations_.size();) {
        if (!test(*operations_[i])) {
            ++i;
            continue;
        }
        moved = true;
        operations_[i] = std::move(operations_.back());
        operations_.pop_back();
    }
    return moved;
}

// Returns whether the operation has ended.
bool MessageLink::test(Operation& operation) {
    bool done = false;
    const int status = library_->test(operation.request, done);
    if (!done && status == 0) return false;
    if (operation.queued) peers_[operation.peer].queued -= operation.queued;
    operation.finish(status ? LinkTransfer::FAILED : LinkTransfer::DONE);
    if (status && !operation.canceled) lose(operation.peer, status);
    return true;
}

}  // namespace ringcomm
