// One end of the connection to a peer of a SocketLink: frames over a stream. What is sent or received
// before there is one waits for it.
//
// A frame is a header and its payload: a transfer, or a packet. Payloads go from the caller's memory into that of the
// receive. What comes before its receive is kept in memory of the connection: one tag never blocks the others. Where
// the pair has flows, large payloads go there.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "link/flows.h"
#include "link/send_queue.h"

namespace ringcomm {

class Connection {
public:
    // Without a stream: begin() gives it one. Adds itself to `lost` once it is.
    Connection(int rank, std::vector<Connection*>& lost) : rank(rank), lost_(lost) {}

    const int rank;  // of the peer

    bool open() const { return stream_ != nullptr; }
    int descriptor() const { return open() ? stream_->fd : -1; }
    bool awaits_socket() const { return awaits_socket_; }
    void begin(std::unique_ptr<ByteStream> stream);
    // Of a send, or why the peer is lost.
    const std::string& failure() const { return failure_; }
    size_t queued_bytes() const { return sends_.bytes(); }  // of payload, without those on flows
    bool has_queued() const { return !sends_.empty(); }
    Flows& flows() { return flows_; }
    const Flows& flows() const { return flows_; }
    bool has_queued_packets() const { return sends_.has_packets(); }
    bool awaits_frames() const { return awaited_ > 0; }
    bool awaits_anything() const { return awaits_frames() || flows_.has_unacknowledged(); }
    // So much has come before its receives that the peer has to wait for some of them. What it has sent before it ended
    // is read all the same.
    bool stalled() const {
        return early_ >= MAX_EARLY && !awaits_frames() && !flows_.has_unacknowledged() && failure_.empty() && !ended_;
    }

    // That it can take, and that no descriptor shows.
    bool holds_received() const {
        return (open() && stream_->holds_received() && !stalled()) || flows_.holds_received();
    }

    void send(uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer);
    // A receive whose data came before the peer was lost still succeeds.
    void receive(uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer);
    static void cancel(LinkTransfer& transfer);
    void drop(uint64_t tag);
    void peer_ended() { ended_ = true; }
    // Writes what it can, and copies the rest.
    void send_packet(std::span<const std::byte> packet);

    // Sends, or takes, up to a piece. Returns whether anything moved.
    bool write();
    bool read(LinkEvents& events);
    bool write_flow(size_t flow);
    bool read_flow(size_t flow);
    void lose(const std::string& reason);
    void abandon();  // in a forked child
    // Loses a peer whose host has not answered for so many seconds: to a probe, or to data.
    void lose_if_silent(double idle_timeout, double resend_timeout);  // socket_liveness.cpp

private:
    static constexpr size_t MAX_EARLY = 64 << 20;
    // A small frame takes one system call, a large one copies at most this.
    static constexpr size_t READ_AHEAD = 8 << 10;

    using Waiting = std::multimap<uint64_t, std::shared_ptr<Receive>>;

    Waiting::iterator find(uint64_t tag);
    bool can_send() const { return (open() || awaits_socket_) && failure_.empty(); }
    // How write() and read() end, by errno; 0: the peer has closed (socket_liveness.cpp).
    void write_failed(int code);
    void read_ended(int code);
    bool parse(LinkEvents& events);
    void begin_payload(uint64_t tag, uint64_t bytes);
    void end_payload(LinkEvents& events);
    void end_transfer(Receive& receive);
    void acknowledge(uint64_t number);
    void begin_orphan(uint64_t number, uint64_t bytes);
    void carry_orphans();
    void fail_sends();

    std::unique_ptr<ByteStream> stream_;
    bool awaits_socket_ = true;
    std::vector<Connection*>& lost_;
    std::string failure_;

    SendQueue sends_;

    Waiting waiting_;     // in the order of the calls and of the frames: per tag, either receives or frames
    size_t awaited_ = 0;  // receives whose frame has not arrived
    size_t early_ = 0;    // what the frames in waiting_ cost
    std::set<uint64_t> dropped_;
    bool ended_ = false;

    std::shared_ptr<Receive> current_;  // its payload arrives; nullptr: a header comes next
    size_t held_ = 0;                   // bytes in read_ahead_
    std::byte read_ahead_[READ_AHEAD];

    Flows flows_;
};

}  // namespace ringcomm
