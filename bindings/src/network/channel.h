// The packets of the point-to-point engine between two ranks, over the link.
#pragma once

#include <deque>
#include <vector>

#include "network/world.h"
#include "p2p/channel.h"

namespace ringcomm {

// Packets that have arrived and are not read yet; under the world's mutex.
using MessageQueue = std::deque<std::vector<std::byte>>;

class NetworkChannel final : public PacketChannel {
public:
    NetworkChannel(NetworkWorld& world, int process, const PacketHead& head, MessageQueue& arrived);

    bool try_write(const PacketHeader& header, const std::byte* payload) override;
    ReceivedPacket next() override;
    bool consume() override;

private:
    NetworkWorld& world_;
    const int process_;
    const PacketHead head_;
    MessageQueue& arrived_;
    std::vector<std::byte> current_;  // what next() returned
    PacketHeader current_header_{};
    uint64_t consumed_ = 0;
};

}  // namespace ringcomm
