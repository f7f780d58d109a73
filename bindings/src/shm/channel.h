// ShmChannel: two rings, and access to the memory of the peer: in the file, through the kernel, or as a thread of its
// process.
#pragma once

#include "p2p/channel.h"
#include "shm/group.h"
#include "shm/rings.h"

namespace ringcomm {

class ShmChannel : public PacketChannel {
public:
    ShmChannel(ShmGroup& group, int peer);

    bool try_write(const PacketHeader& header, const std::byte* payload) override;
    ReceivedPacket next() override;
    bool consume() override;

    uint64_t offer_memory(const std::byte* data, size_t bytes) override;
    bool reads_memory(uint64_t location) override;
    Read read_memory(std::byte* target, uint64_t location, size_t bytes) override;
    void end_access() override;

protected:
    virtual void wake_peer() { wake_all(doorbell_); }

private:
    void notify_peer() {
        if (has_sleeper(doorbell_)) wake_peer();
    }
    bool offers_address(const std::byte* data, size_t bytes);
    bool memory_valid() const;

    ShmGroup& group_;
    const int peer_, member_;  // its rank here, and in the world
    Doorbell& doorbell_;       // of the peer
    SendRing out_;
    ReceiveRing in_;
    OutputStores output_stores_;
};

}  // namespace ringcomm
