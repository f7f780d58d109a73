// A link over one stream socket per peer on another host. UCX over TCP takes up to 1.6 times as long: see
// docs/network.md.
#pragma once

#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "link/connection.h"
#include "link/connection_requests.h"
#include "link/wake_up.h"

namespace ringcomm {

class SocketLink final : public Link {
public:
    // Its connections probe their peers. A host that does not answer for so many seconds, to a probe or to data, is
    // lost; one whose process only does not read is not. `name`: of this network, on this machine.
    SocketLink(int rank, int size, const std::string& name, double idle_timeout, double resend_timeout);
    ~SocketLink() override;

    void send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    void receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) override;
    void cancel(LinkTransfer& transfer) override;
    void drop(uint64_t tag) override;
    void send_packet(int peer, std::span<const std::byte> packet) override;
    bool progress(LinkEvents& events) override;
    bool has_room(int peer) const override;
    bool has_queued(int peer) const override;
    bool connected(int peer) const override;
    void connect(int peer) override;
    bool connecting() const override;
    void sleep(uint64_t ns) override;
    void wake() override;
    void wake_peer(int peer) override { host_.wake(peer); }
    size_t window() const override { return std::min(MOST_WINDOW, Link::window() * (1 + most_flows_)); }
    bool flushed() const override;
    void after_fork() override;

    // Connections are made elsewhere, by whoever looks at these. Of a peer that is neither connected nor lost, begin()
    // takes the stream, or give_up() loses it.
    ConnectionRequests& requests() { return requests_; }
    bool awaits_socket(int peer) const;
    void begin(int peer, std::unique_ptr<ByteStream> stream);
    void give_up(int peer, const std::string& reason);
    // So many flows are wanted to each peer that sends or gets large data.
    void want_flows(int count) { flows_ = std::max(flows_, count); }
    void add_flow(int peer, std::unique_ptr<ByteStream> stream);

private:
    using Clock = std::chrono::steady_clock;

    struct Peer : Connection {
        using Connection::Connection;

        // Once a send has failed, a read finds the end.
        bool readable() const {
            return awaits_anything() || (open() && (expecting || !failure().empty() || holds_received()));
        }
        bool busy() const { return open() && (readable() || has_queued()); }

        bool active = false;  // it is in active_
        int expecting = 0;    // an answer to a packet, for so many calls of progress()
        uint32_t watched = EPOLLIN;
        std::vector<uint32_t> watched_flows;
        bool wanted = false;  // a connection, by connect()
        int wanted_flows = 0;
        std::vector<std::string> ended_flows;  // why, since the last look
    };

    // Of an event of epoll: the connection of a peer, or one of its flows.
    struct Source {
        Source(int peer, int flow = -1) : peer(peer), flow(flow) {}
        explicit Source(uint64_t packed) : peer(int(uint32_t(packed))), flow(int(packed >> 32)) {}
        uint64_t packed() const { return uint64_t(uint32_t(flow)) << 32 | uint32_t(peer); }

        int peer, flow;
    };

    void configure(int fd, Source source) const;
    void attend(Peer& peer);
    bool write(Peer& peer);
    bool write_flows(Peer& peer);
    bool read(Peer& peer, LinkEvents& events);
    bool poll(LinkEvents& events);
    void want_flows(Peer& peer, size_t bytes);
    void report_ended_flows(Peer& peer);
    void watch(Peer& peer);

    const double idle_timeout_, resend_timeout_;
    std::vector<Connection*> lost_;  // not yet reported
    std::deque<Peer> peers_;
    Descriptor epoll_;    // every socket; for what its connection can do
    Descriptor wake_up_;  // readable after wake()
    WakeUp host_;         // after wake_peer() of others
    ConnectionRequests requests_;
    int flows_ = 0;              // wanted to each peer
    size_t most_flows_ = 0;      // of a peer
    std::vector<Peer*> active_;  // with something to send or to receive, and maybe some that had
    unsigned calls_ = 0;         // of progress()
    Clock::time_point next_check_;
};

}  // namespace ringcomm
