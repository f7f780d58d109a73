// The packets of the point-to-point engine between ranks of two hosts, over the link.
//
// Small messages, and what announces large ones, travel in packets. The receiver of a large message pulls it: it posts
// receives on the link, in its own array, and asks the sender to send from its array. So nothing is copied.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "network/world.h"
#include "p2p/channel.h"

namespace ringcomm {

// What has come from one rank, and what it pulls. Under the world's mutex.
class PeerMessages {
public:
    // The rank asks for `bytes` at `address` of this rank, which it has offered.
    void pulled(Link& link, int process, uint64_t tag, const std::byte* address, size_t bytes);
    // Afterwards nothing is sent from the memory of this rank.
    void end(Link& link);

    std::deque<std::vector<std::byte>> packets;  // not read yet
    std::optional<PacketHeader> unsent_close;    // for a rank that is not connected

private:
    std::deque<LinkTransfer> sends_;
    bool ended_ = false;
};

class NetworkChannel final : public PacketChannel {
public:
    // `head`: of MESSAGE packets to this peer; `tag`: of pulled data.
    NetworkChannel(NetworkWorld& world, int process, const PacketHead& head, uint64_t tag, PeerMessages& messages);

    bool try_write(const PacketHeader& header, const std::byte* payload) override;
    ReceivedPacket next() override;
    bool consume() override;
    bool on_this_host() const override { return false; }
    uint64_t offer_memory(const std::byte* data, size_t) override { return reinterpret_cast<uintptr_t>(data); }
    bool reads_memory(uint64_t) override { return true; }
    Read read_memory(std::byte* target, uint64_t address, size_t bytes) override;
    void end_access() override;

private:
    NetworkWorld& world_;
    const int process_;
    const PacketHead head_;
    const uint64_t tag_;
    PeerMessages& messages_;
    std::vector<std::byte> current_;  // what next() returned
    PacketHeader current_header_{};
    uint64_t consumed_ = 0;
    std::deque<LinkTransfer> receives_;  // of the pull in progress
};

}  // namespace ringcomm
