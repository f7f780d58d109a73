// NetworkChannel: packets of messages, as packets of the link.
#include "network/channel.h"

#include <algorithm>

namespace ringcomm {

namespace {

constexpr size_t EAGER_BYTES = 64 << 10, DATA_BYTES = 120 << 10;
static_assert(DATA_BYTES + sizeof(PacketHead) + sizeof(PacketHeader) <= Link::MAX_PACKET);

template <class Transfer>
void for_each_piece(const Link& link, size_t bytes, Transfer transfer) {
    const size_t piece = link.piece_bytes();
    for (size_t at = 0; at < bytes; at += piece) transfer(at, std::min(piece, bytes - at));
}

}  // namespace

void PeerMessages::pulled(Link& link, int process, uint64_t tag, const std::byte* address, size_t bytes) {
    if (ended_) return;
    while (!sends_.empty() && sends_.front().ended()) sends_.pop_front();
    for_each_piece(link, bytes, [&](size_t at, size_t length) {
        link.send(process, tag, address + at, length, sends_.emplace_back());
    });
}

void PeerMessages::end(Link& link) {
    ended_ = true;
    for (LinkTransfer& send : sends_) link.cancel(send);
    sends_.clear();
}

NetworkChannel::NetworkChannel(NetworkWorld& world, int process, const PacketHead& head, uint64_t tag,
                               PeerMessages& messages)
    : PacketChannel(EAGER_BYTES, DATA_BYTES),
      world_(world),
      process_(process),
      head_(head),
      tag_(tag),
      messages_(messages) {}

PacketChannel::Read NetworkChannel::read_memory(std::byte* target, uint64_t address, size_t bytes) {
    const std::lock_guard lock(world_.mutex);
    if (receives_.empty()) {
        for_each_piece(*world_.link, bytes, [&](size_t at, size_t length) {
            world_.link->receive(process_, tag_, target + at, length, receives_.emplace_back());
        });
        PacketHead head = head_;
        head.type = PacketType::PULL;
        PacketWriter packet(head);
        packet.add(address);
        packet.add(uint64_t(bytes));
        world_.send_packet(process_, packet.packet());
    }
    for (const LinkTransfer& receive : receives_) {
        if (receive.state != LinkTransfer::DONE) return Read::PENDING;
    }
    receives_.clear();
    return Read::DONE;
}

void NetworkChannel::end_access() {
    const std::lock_guard lock(world_.mutex);
    for (LinkTransfer& receive : receives_) world_.link->cancel(receive);
    receives_.clear();
    messages_.end(*world_.link);
}

bool NetworkChannel::try_write(const PacketHeader& header, const std::byte* payload) {
    const std::lock_guard lock(world_.mutex);
    if (!world_.link->has_room(process_)) {
        if (header.kind == PACKET_CLOSE && !world_.link->connected(process_)) {  // it may never need this rank
            messages_.unsent_close = header;
            return true;
        }
        world_.link->connect(process_);
        return false;
    }
    PacketWriter packet(head_);
    packet.add(header);
    if (header.has_payload()) packet.add(Bytes(payload, header.bytes));
    world_.send_packet(process_, packet.packet());
    return true;
}

ReceivedPacket NetworkChannel::next() {
    if (current_.empty()) {
        const std::lock_guard lock(world_.mutex);
        if (messages_.packets.empty()) return {};
        current_ = std::move(messages_.packets.front());
        messages_.packets.pop_front();
    }
    PacketReader reader(current_);
    current_header_ = reader.next<PacketHeader>();
    return {&current_header_, reader.rest().data()};
}

bool NetworkChannel::consume() {
    current_.clear();
    return ++consumed_ % PACKETS == 0;
}

}  // namespace ringcomm
