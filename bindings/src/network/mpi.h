// A link over an MPI communicator of its own. MPI is the one that Python has loaded: its functions are called by their
// addresses, so that one build serves every MPI, whether its handles are ints or pointers.
//
// Nothing waits inside MPI: what is in flight is tested again and again. A packet is one message, whose head says who
// sent it; MPI is asked for those that have come. A transfer is one message from and to the caller's memory.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "network/link.h"
#include "ringcomm.h"

namespace ringcomm {

class MpiLink final : public Link {
public:
    static constexpr size_t MAX_TRANSFER = size_t{1} << 30;  // MPI counts with ints

    MpiLink(int rank, int size, const rc_mpi& mpi);
    ~MpiLink() override;  // before MPI is finalized

    void send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    void receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    // MPI cannot take back a send, nor a receive that has begun to arrive. This waits for them, at most for a second:
    // the peer, which has failed as well, receives and drops what is sent to it. See stuck().
    void cancel(LinkTransfer& transfer) override;
    void drop(uint64_t tag) override;
    bool stuck() const override;
    void send_packet(int peer, std::span<const std::byte> packet) override;
    bool has_room(int peer) const override { return peers_[peer].queued < MAX_QUEUED; }
    bool progress(LinkEvents& events) override;
    void sleep(uint64_t ns) override;
    void wake() override { woken_ = true; }
    bool flushed() const override { return leaving().unsent == 0; }
    void abandon() override {}  // a forked child must not call MPI

    // Tells the peers, the first time, that no packet follows.
    void leave();
    rc_leaving leaving() const;

private:
    static constexpr size_t MAX_QUEUED = 1 << 20;  // bytes for a peer, before the next packet should wait

    class Functions;
    template <class Handle>
    class FunctionsOf;
    struct Operation;
    struct PacketPrefix;
    struct Arriving {  // a packet
        uint64_t request = 0;
        std::unique_ptr<std::byte[]> memory;
    };
    struct Peer {
        size_t queued = 0;  // bytes of packets
        bool left = false, lost = false;
        std::string failure;
    };
    struct Dropped {
        int tag;
        uint64_t until;  // ns
    };

    int mpi_tag(uint64_t tag) const { return int(1 + tag % uint64_t(most_tag_)); }
    void send_message(int peer, std::unique_ptr<std::byte[]> message, size_t bytes);
    Operation* begin(Operation operation, const std::byte* data, size_t bytes, int tag);
    bool receive_packets(LinkEvents& events);
    bool test_operations();
    bool test(Operation& operation);
    bool receive_dropped();
    void lose(int peer, int status);

    const std::unique_ptr<Functions> mpi_;
    const int most_tag_;
    std::vector<Peer> peers_;
    std::vector<int> lost_;  // not yet reported
    std::vector<std::unique_ptr<Operation>> operations_;
    std::deque<Arriving> arriving_;
    std::vector<Dropped> dropped_;
    uint64_t patience_ends_ = 0;  // of cancel(), ns
    bool left_ = false, failed_ = false;
    std::atomic<bool> woken_{false};
    std::atomic<uint64_t> pause_;  // ns that the next sleep takes
};

}  // namespace ringcomm
