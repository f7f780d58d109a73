// NetworkChannel: packets of messages, as packets of the link.
#include "network/channel.h"

namespace ringcomm {

namespace {

constexpr size_t EAGER_BYTES = 32 << 10, DATA_BYTES = 60 << 10;
static_assert(DATA_BYTES + sizeof(PacketHead) + sizeof(PacketHeader) <= Link::MAX_PACKET);

}  // namespace

NetworkChannel::NetworkChannel(NetworkWorld& world, int process, const PacketHead& head, MessageQueue& arrived)
    : PacketChannel(EAGER_BYTES, DATA_BYTES), world_(world), process_(process), head_(head), arrived_(arrived) {}

bool NetworkChannel::try_write(const PacketHeader& header, const std::byte* payload) {
    const std::lock_guard lock(world_.mutex);
    if (!world_.link->has_room(process_)) return false;
    PacketWriter packet(head_);
    packet.add(header);
    if (header.has_payload()) packet.add(Bytes(payload, header.bytes));
    world_.link->send_packet(process_, packet.packet());
    return true;
}

ReceivedPacket NetworkChannel::next() {
    if (current_.empty()) {
        const std::lock_guard lock(world_.mutex);
        if (arrived_.empty()) return {};
        current_ = std::move(arrived_.front());
        arrived_.pop_front();
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
