// A link over one stream socket per peer. UCX over TCP takes up to 1.6 times as long: see docs/network.md.
//
// A frame is a header and its payload: a transfer, or a packet. Payloads go from the caller's memory into that of the
// receive. What comes before its receive is kept in memory of the link: one tag never blocks the others of a peer.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "network/link.h"

namespace ringcomm {

class SocketLink final : public Link {
public:
    // Owns `sockets`: one connected TCP socket per peer, -1 for none. A host that does not answer for about `keepalive`
    // seconds is lost; one whose process only does not read is not.
    SocketLink(int rank, int size, std::span<const int> sockets, double keepalive = 15);
    ~SocketLink() override;

    void send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    // A receive whose data came before its peer was lost still succeeds.
    void receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    void cancel(LinkTransfer& transfer) override;
    void send_packet(int peer, std::span<const std::byte> packet) override;
    bool progress(LinkEvents& events) override;
    bool has_room(int peer) const override;
    bool has_queued(int peer) const override;
    void sleep(uint64_t ns) override;
    void wake() override;
    bool flushed() const override;
    void abandon() override;

private:
    using Clock = std::chrono::steady_clock;

    struct Descriptor {
        int fd = -1;

        ~Descriptor() { close(); }
        void close();
    };
    struct Operation;
    struct Send;
    struct Receive;
    struct Peer;

    void configure(const Peer& peer) const;
    void enqueue(Peer& peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer* transfer);
    bool write(Peer& peer);
    bool read(Peer& peer, LinkEvents& events);
    bool parse(Peer& peer, LinkEvents& events);
    void begin_payload(Peer& peer, uint64_t tag, uint64_t bytes);
    void end_payload(Peer& peer, LinkEvents& events);
    bool poll(LinkEvents& events);
    void check_hosts();
    void watch(Peer& peer, bool writable);
    void activate(Peer& peer);
    void fail_sends(Peer& peer);
    void lose(Peer& peer, const std::string& reason);

    const std::chrono::milliseconds keepalive_;
    std::unique_ptr<Peer[]> peers_;
    Descriptor epoll_;           // every socket; for EPOLLOUT too where data is queued
    Descriptor wake_up_;         // readable after wake()
    std::vector<Peer*> active_;  // with something to send or to receive, and maybe some that had
    std::vector<Peer*> lost_;    // not yet reported
    unsigned calls_ = 0;         // of progress()
    Clock::time_point next_check_;
};

}  // namespace ringcomm
