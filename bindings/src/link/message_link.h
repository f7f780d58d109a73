// A link over a MessageLibrary. Nothing waits in the library: the link polls what is in flight. A packet is one
// message, whose prefix says who sent it; the link asks the library for messages that have arrived. A transfer is one
// message from and to the caller's memory.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "link/link.h"
#include "link/message_library.h"
#include "ringcomm.h"

namespace ringcomm {

class MessageLink final : public Link {
public:
    MessageLink(int rank, int size, std::unique_ptr<MessageLibrary> library);
    ~MessageLink() override;

    void send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    void receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    // A send cannot be taken back, nor a receive that has begun to arrive. This waits for them, at most for a second:
    // the peer, which has failed as well, receives and drops what is sent to it. See stuck().
    void cancel(LinkTransfer& transfer) override;
    void drop(uint64_t tag) override;
    bool dropping() const override { return !dropped_.empty() && library_->any_thread(); }
    bool stuck() const override;
    // Of longer messages than packets: each begins with a handshake.
    size_t piece_bytes() const override { return 1 << 20; }
    void send_packet(int peer, std::span<const std::byte> packet) override;
    bool has_room(int peer) const override { return peers_[peer].queued < MAX_QUEUED; }
    bool has_queued(int peer) const override { return peers_[peer].queued && library_->any_thread(); }
    bool progress(LinkEvents& events) override;
    void sleep(uint64_t ns) override { library_->sleep(ns); }
    void wake() override { library_->wake(); }
    bool flushed() const override { return leaving().unsent == 0; }
    void after_fork() override {}  // a forked child must not call the library

    // Tells the peers, the first time, that no packet follows.
    void leave();
    rc_leaving leaving() const;

private:
    static constexpr size_t MAX_QUEUED = 1 << 20;  // bytes for a peer, before the next packet should wait

    struct Operation;
    struct PacketPrefix;
    struct Arriving {  // a packet
        int peer;
        std::unique_ptr<std::byte[]> memory;
        uint64_t request = 0;
    };
    struct Peer {
        size_t queued = 0;  // bytes of packets
        bool left = false, lost = false;
        std::string failure;
    };
    struct Dropped {
        uint64_t tag, until;  // ns
    };

    Operation* begin(Operation operation, const std::byte* data, size_t bytes, uint64_t tag);
    bool receive_packets(LinkEvents& events);
    bool test_operations();
    bool test(Operation& operation);
    bool receive_dropped();
    // message_liveness.cpp
    void lose_peers();
    void lose(int peer, int status);

    const std::unique_ptr<MessageLibrary> library_;
    std::vector<Peer> peers_;
    std::vector<int> lost_;  // not yet reported
    std::vector<std::unique_ptr<Operation>> operations_;
    std::deque<Arriving> arriving_;
    std::vector<Dropped> dropped_;
    uint64_t cancel_deadline_ = 0, cancel_waited_ = 0;  // of cancel(), ns: until when it waits, when it last did
    bool left_ = false, failed_ = false;
};

}  // namespace ringcomm
