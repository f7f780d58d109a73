// SocketLink: which connections to serve, and which are lost.
#include "link/sockets.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

// With more active peers than this, one epoll_wait is cheaper than asking each; with fewer, it looks after the inactive
// ones in one of so many calls.
constexpr size_t FEW_PEERS = 8;
constexpr unsigned POLL_INTERVAL = 8;

constexpr size_t MAX_QUEUED = 1 << 20;  // bytes for a peer, before the next packet should wait
constexpr int ANSWER_CALLS = 64;        // a packet is mostly answered soon: until then its peer is asked directly
constexpr std::chrono::milliseconds CHECK_INTERVAL{200};  // of the hosts

void set_option(int fd, int level, int option, int value) {
    if (setsockopt(fd, level, option, &value, sizeof value)) throw_errno("setsockopt");
}

}  // namespace

SocketLink::SocketLink(int rank, int size, const std::string& name, double idle_timeout, double resend_timeout)
    : Link(rank, size),
      idle_timeout_(idle_timeout),
      resend_timeout_(resend_timeout),
      host_(name, rank),
      next_check_(Clock::now()) {
    for (int r = 0; r < size; ++r) peers_.emplace_back(r, lost_);
    epoll_.fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_.fd < 0) throw_errno("epoll_create1");
    wake_up_.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_up_.fd < 0) throw_errno("eventfd");
}

SocketLink::~SocketLink() = default;

void SocketLink::configure(int fd, Source source) const {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK)) throw_errno("fcntl");
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    epoll_event event{.events = EPOLLIN, .data = {.u64 = source.packed()}};
    if (epoll_ctl(epoll_.fd, EPOLL_CTL_ADD, fd, &event)) throw_errno("epoll_ctl");
}

void SocketLink::send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    want_flows(peers_[peer], bytes);
    peers_[peer].send(tag, data, bytes, transfer);
    if (!transfer.ended()) write_flows(peers_[peer]);
    attend(peers_[peer]);
}

void SocketLink::receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    want_flows(peers_[peer], bytes);
    peers_[peer].receive(tag, data, bytes, transfer);
    attend(peers_[peer]);
}

void SocketLink::cancel(LinkTransfer& transfer) { Connection::cancel(transfer); }

void SocketLink::drop(uint64_t tag) {
    for (Peer& peer : peers_) {
        peer.drop(tag);
        watch(peer);
    }
}

void SocketLink::send_packet(int peer, std::span<const std::byte> packet) {
    assert(packet.size() <= MAX_PACKET);
    peers_[peer].expecting = ANSWER_CALLS;
    peers_[peer].send_packet(packet);
    attend(peers_[peer]);
}

// After a call has left something to send or to receive.
void SocketLink::attend(Peer& peer) {
    if (!peer.open()) return connect(peer.rank);
    watch(peer);
    if (!peer.busy() || peer.active) return;
    active_.push_back(&peer);
    peer.active = true;
}

bool SocketLink::write(Peer& peer) {
    bool moved = peer.write();
    moved |= write_flows(peer);
    watch(peer);
    return moved;
}

bool SocketLink::write_flows(Peer& peer) {
    bool moved = false;
    for (size_t i = 0; i < peer.flows().size(); ++i) moved |= peer.write_flow(i);
    return moved;
}

bool SocketLink::read(Peer& peer, LinkEvents& events) {
    bool moved = peer.read(events);
    for (size_t i = 0; i < peer.flows().size(); ++i) moved |= peer.read_flow(i);
    if (peer.flows().size() && peer.has_queued_packets()) events.packet_queued(peer.rank);
    if (peer.holds_received()) attend(peer);  // else nothing says so
    watch(peer);
    return moved;
}

bool SocketLink::progress(LinkEvents& events) {
    bool moved = false;
    const bool few = active_.size() <= FEW_PEERS;
    for (size_t i = 0; i < active_.size();) {  // an event may append to it
        Peer& peer = *active_[i];
        if (few) moved |= write(peer);
        if (few ? peer.readable() : peer.holds_received()) moved |= read(peer, events);
        if (peer.expecting) --peer.expecting;
        if (peer.busy()) {
            ++i;
        } else {
            peer.active = false;
            active_[i] = active_.back();
            active_.pop_back();
        }
    }
    if (!few || active_.empty() || ++calls_ % POLL_INTERVAL == 0) moved |= poll(events);
    for (const Connection* peer : std::exchange(lost_, {})) {
        moved = true;
        events.peer_lost(peer->rank, peer->failure());
    }
    return moved;
}

void SocketLink::sleep(uint64_t ns) {
    // epoll_wait counts milliseconds, and epoll_pwait2 needs Linux 5.11.
    pollfd ready[]{{epoll_.fd, POLLIN, 0}, {wake_up_.fd, POLLIN, 0}, {host_.fd, POLLIN, 0}};
    const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    ppoll(ready, std::size(ready), &timeout, nullptr);
    eventfd_t wake_ups;
    if (ready[1].revents) eventfd_read(wake_up_.fd, &wake_ups);
    if (ready[2].revents) host_.clear();
}

void SocketLink::wake() { eventfd_write(wake_up_.fd, 1); }

bool SocketLink::has_room(int peer) const { return !awaits_socket(peer) && peers_[peer].queued_bytes() < MAX_QUEUED; }

bool SocketLink::has_queued(int peer) const { return connected(peer) && peers_[peer].has_queued_packets(); }

bool SocketLink::connected(int peer) const { return peers_[peer].open(); }

bool SocketLink::awaits_socket(int peer) const { return peers_[peer].awaits_socket(); }

void SocketLink::connect(int peer) {
    if (!peers_[peer].awaits_socket() || std::exchange(peers_[peer].wanted, true)) return;
    requests_.want({peer, 0});
}

// Both ends of a transfer come here; the higher rank connects.
void SocketLink::want_flows(Peer& peer, size_t bytes) {
    if (bytes < Flows::LEAST_BYTES || rank < peer.rank || !peer.open()) return;
    while (peer.wanted_flows < flows_) requests_.want({peer.rank, ++peer.wanted_flows});
}

bool SocketLink::connecting() const {
    const auto waits = [](const Peer& peer) { return peer.awaits_socket() && peer.has_queued(); };
    return std::any_of(peers_.begin(), peers_.end(), waits);
}

void SocketLink::begin(int number, std::unique_ptr<ByteStream> stream) {
    Peer& peer = peers_[number];
    peer.begin(std::move(stream));
    try {
        configure(peer.descriptor(), {peer.rank});
    } catch (const Failure& failure) {
        return peer.lose(failure.error.message);
    }
    peer.write();
    attend(peer);
    if (peer.holds_received()) wake();
}

void SocketLink::add_flow(int number, std::unique_ptr<ByteStream> stream) {
    Peer& peer = peers_[number];
    if (!peer.open()) return;
    configure(stream->fd, {number, int(peer.flows().size())});
    peer.flows().add(std::move(stream));
    peer.watched_flows.push_back(EPOLLIN);
    most_flows_ = std::max(most_flows_, peer.flows().size());
    attend(peer);
    if (peer.holds_received()) wake();
}

void SocketLink::give_up(int peer, const std::string& reason) { peers_[peer].lose(reason); }

void SocketLink::after_fork() {
    for (Peer& peer : peers_) peer.abandon();
    epoll_.close();
    wake_up_.close();
    host_.close();
    requests_.close();
}

bool SocketLink::flushed() const {
    for (const Peer& peer : peers_) {
        int unacknowledged = 0;
        if (peer.has_queued() || peer.flows().has_unacknowledged()) return false;
        if (peer.open() && ioctl(peer.descriptor(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged) return false;
    }
    return true;
}

// Serves the sockets that epoll finds ready.
bool SocketLink::poll(LinkEvents& events) {
    epoll_event ready[64];
    const int count = epoll_wait(epoll_.fd, ready, std::size(ready), 0);
    bool moved = false;
    for (int i = 0; i < count; ++i) {
        const Source source(ready[i].data.u64);
        Peer& peer = peers_[source.peer];
        if (ready[i].events & EPOLLOUT) moved |= write(peer);
        if (source.flow < 0 && ready[i].events & (EPOLLERR | EPOLLHUP)) peer.peer_ended();
        if (ready[i].events & ~EPOLLOUT) moved |= read(peer, events);
    }
    if (const auto now = Clock::now(); now >= next_check_) {
        next_check_ = now + CHECK_INTERVAL;
        if (host_.clear()) wake();  // for a thread that sleeps
        for (Peer& peer : peers_) {
            peer.lose_if_silent(idle_timeout_, resend_timeout_);
            if (peer.open()) report_ended_flows(peer);  // else they have ended with their peer
        }
    }
    return moved;
}

// At the second look: if the peer itself has ended, that is known by then.
void SocketLink::report_ended_flows(Peer& peer) {
    for (const std::string& reason : std::exchange(peer.ended_flows, peer.flows().take_ended())) {
        requests_.flow_ended({peer.rank, peer.flows().open(), reason});
    }
}

// Tells epoll what to wait for.
void SocketLink::watch(Peer& peer) {
    if (!peer.open()) return;
    const auto change = [&](int fd, uint32_t& watched, bool reads, bool writes, Source source) {
        const uint32_t wanted = (reads ? uint32_t(EPOLLIN) : 0) | (writes ? uint32_t(EPOLLOUT) : 0);
        if (wanted == watched || fd < 0) return;
        epoll_event event{.events = wanted, .data = {.u64 = source.packed()}};
        epoll_ctl(epoll_.fd, EPOLL_CTL_MOD, fd, &event);
        watched = wanted;
    };
    change(peer.descriptor(), peer.watched, !peer.stalled(), peer.has_queued(), {peer.rank});
    const Flows& flows = peer.flows();
    for (size_t i = 0; i < flows.size(); ++i) {
        change(flows.descriptor(i), peer.watched_flows[i], !flows.waits_for_header(i), flows.waits_for_room(i),
               {peer.rank, int(i)});
    }
}

}  // namespace ringcomm
