// SocketLink: frames over nonblocking sockets.
#include "network/sockets.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

// The longest payload that one system call moves. Sends and receives alternate in such pieces: with larger ones the
// data leaves the caches in between, and an exchange of 16 MiB falls from 1.9 to 0.7 GB/s.
constexpr size_t PIECE = 32 << 10;
constexpr size_t READ_AHEAD = 8 << 10;         // a small frame takes one system call, a large one copies at most this
constexpr size_t MAX_QUEUED = 1 << 20;         // bytes for a peer, before the next packet should wait
constexpr size_t MAX_EARLY = size_t{1} << 30;  // bytes per peer that wait for their receives

// With more active peers than this, one epoll_wait is cheaper than asking each; with fewer, it looks after the inactive
// ones in one of so many calls.
constexpr size_t FEW_PEERS = 8;
constexpr unsigned POLL_INTERVAL = 8;

constexpr int ANSWER_CALLS = 64;  // a packet is mostly answered soon: until then its peer is asked directly

constexpr uint64_t PACKET = 0;  // the tag of packets

struct FrameHeader {
    uint64_t tag, bytes;
};

std::string length_mismatch(uint64_t sent, uint64_t received) {
    return format("sent %" PRIu64 " bytes to a receive of %" PRIu64, sent, received);
}

void finish(LinkTransfer*& transfer, LinkTransfer::State state) {
    if (transfer) {
        transfer->handle = nullptr;
        transfer->state = state;
        transfer = nullptr;
    }
}

void set_option(int fd, int level, int option, int value) {
    if (setsockopt(fd, level, option, &value, sizeof value)) throw_errno("setsockopt");
}

}  // namespace

void SocketLink::Descriptor::close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
}

// What the handle of a transfer points to.
struct SocketLink::Operation {
    LinkTransfer* transfer;  // nullptr: the caller does not wait for it
    const bool sends;
};

struct SocketLink::Send : Operation {
    Send(uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer* transfer)
        : Operation{transfer, true}, header{tag, bytes}, next(data), left(bytes) {}

    void keep_rest() {  // the caller's memory will change
        copy = std::make_unique_for_overwrite<std::byte[]>(left);
        std::copy_n(next, left, copy.get());
        next = copy.get();
    }

    FrameHeader header;
    size_t header_sent = 0;
    const std::byte* next;
    size_t left;
    std::unique_ptr<std::byte[]> copy;
};

// A receive without a frame, a frame without a receive, or both.
struct SocketLink::Receive : Operation {
    enum Kind { POSTED, EARLY, OF_PACKET };

    Receive(LinkTransfer* transfer, std::byte* target, size_t bytes)
        : Operation{transfer, false}, kind(POSTED), target(target), bytes(bytes) {}
    Receive(Kind kind, std::unique_ptr<std::byte[]> memory, size_t bytes)
        : Operation{nullptr, false}, kind(kind), target(memory.get()), bytes(bytes), memory(std::move(memory)) {}

    size_t missing() const { return bytes - arrived; }
    size_t cost() const { return sizeof *this + bytes; }

    Kind kind;
    std::byte* target;  // nullptr: canceled; the payload is discarded
    const size_t bytes;
    size_t arrived = 0;
    std::unique_ptr<std::byte[]> memory;
};

struct SocketLink::Peer : Descriptor {
    bool open() const { return fd >= 0; }
    // Once a send has failed, a read finds the end.
    bool readable() const { return awaited || (open() && (expecting || !failure.empty())); }
    bool busy() const { return readable() || !queue.empty(); }
    // The first entry of a tag.
    auto find(uint64_t tag) {
        const auto found = waiting.lower_bound(tag);
        return found != waiting.end() && found->first == tag ? found : waiting.end();
    }

    int rank = -1;
    std::string failure;   // of a send, or why the peer is lost
    bool active = false;   // it is in active_
    int expecting = 0;     // an answer to a packet, for so many calls of progress()
    bool watched = false;  // for EPOLLOUT

    std::deque<Send> queue;  // its elements stay where they are
    size_t queued = 0;       // bytes of payload in it

    // In the order of the calls and of the frames: per tag, either receives or frames.
    std::multimap<uint64_t, std::shared_ptr<Receive>> waiting;
    size_t awaited = 0;  // receives whose frame has not arrived
    size_t early = 0;    // what the frames in `waiting` cost

    std::shared_ptr<Receive> current;  // its payload arrives; nullptr: a header comes next
    size_t held = 0;                   // bytes in read_ahead
    std::byte read_ahead[READ_AHEAD];
};

SocketLink::SocketLink(int rank, int size, std::span<const int> sockets, double keepalive)
    : Link(rank, size),
      keepalive_(std::chrono::milliseconds(int64_t(keepalive * 1000))),
      peers_(new Peer[size]),
      next_check_(Clock::now() + keepalive_) {
    assert(int(sockets.size()) == size && sockets[rank] == -1);
    for (int r = 0; r < size; ++r) {
        peers_[r].rank = r;
        peers_[r].fd = sockets[r];
    }
    epoll_.fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_.fd < 0) throw_errno("epoll_create1");
    wake_up_.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_up_.fd < 0) throw_errno("eventfd");
    for (int r = 0; r < size; ++r) {
        if (peers_[r].open()) configure(peers_[r]);
    }
}

SocketLink::~SocketLink() = default;

void SocketLink::configure(const Peer& peer) const {
    const int interval = std::max<int>(1, keepalive_.count() / 3000);  // seconds
    const int flags = fcntl(peer.fd, F_GETFL);
    if (flags < 0 || fcntl(peer.fd, F_SETFL, flags | O_NONBLOCK)) throw_errno("fcntl");
    set_option(peer.fd, IPPROTO_TCP, TCP_NODELAY, 1);
    // These notice the end of an idle connection; check_hosts() that of one with data on its way.
    set_option(peer.fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(peer.fd, IPPROTO_TCP, TCP_KEEPIDLE, interval);
    set_option(peer.fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
    set_option(peer.fd, IPPROTO_TCP, TCP_KEEPCNT, 2);
    epoll_event event{.events = EPOLLIN, .data = {.u32 = uint32_t(peer.rank)}};
    if (epoll_ctl(epoll_.fd, EPOLL_CTL_ADD, peer.fd, &event)) throw_errno("epoll_ctl");
}

void SocketLink::send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != PACKET && peer != rank);
    transfer.state = LinkTransfer::ACTIVE;
    enqueue(peers_[peer], tag, data, bytes, &transfer);
}

void SocketLink::send_packet(int peer, std::span<const std::byte> packet) {
    assert(packet.size() <= MAX_PACKET && peer != rank);
    Peer& to = peers_[peer];
    to.expecting = ANSWER_CALLS;
    enqueue(to, PACKET, packet.data(), packet.size(), nullptr);
    if (!to.queue.empty()) to.queue.back().keep_rest();
}

void SocketLink::enqueue(Peer& peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer* transfer) {
    if (!peer.open() || !peer.failure.empty()) return finish(transfer, LinkTransfer::FAILED);
    Send& frame = peer.queue.emplace_back(tag, data, bytes, transfer);
    peer.queued += bytes;
    if (transfer) transfer->handle = static_cast<Operation*>(&frame);
    if (peer.queue.size() > 1) return;  // it waits for its turn
    write(peer);
    if (peer.busy()) activate(peer);
    if (!peer.queue.empty()) watch(peer, true);
}

void SocketLink::receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != PACKET && peer != rank);
    Peer& from = peers_[peer];
    transfer.state = LinkTransfer::ACTIVE;
    LinkTransfer* waiter = &transfer;
    const auto found = from.find(tag);
    if (found == from.waiting.end() || found->second->kind == Receive::POSTED) {
        if (!from.open()) return finish(waiter, LinkTransfer::FAILED);
        const auto receive = std::make_shared<Receive>(waiter, data, bytes);
        transfer.handle = static_cast<Operation*>(receive.get());
        from.waiting.emplace(tag, receive);
        ++from.awaited;
        return activate(from);
    }
    const auto frame = found->second;
    from.waiting.erase(found);
    from.early -= frame->cost();
    if (frame->bytes != bytes) {
        finish(waiter, LinkTransfer::FAILED);
        return lose(from, length_mismatch(frame->bytes, bytes));
    }
    std::copy_n(frame->memory.get(), frame->arrived, data);
    if (frame->missing() == 0) return finish(waiter, LinkTransfer::DONE);
    frame->kind = Receive::POSTED;
    frame->target = data;
    frame->memory.reset();
    frame->transfer = waiter;
    transfer.handle = static_cast<Operation*>(frame.get());
    ++from.awaited;
    activate(from);
}

void SocketLink::cancel(LinkTransfer& transfer) {
    if (transfer.ended()) return;
    auto& operation = *static_cast<Operation*>(transfer.handle);
    finish(operation.transfer, LinkTransfer::FAILED);
    // Both sides stay in step: a send is still sent, a receive takes its frame out of the stream.
    if (operation.sends) {
        static_cast<Send&>(operation).keep_rest();
    } else {
        static_cast<Receive&>(operation).target = nullptr;
    }
}

bool SocketLink::progress(LinkEvents& events) {
    bool moved = false;
    const bool few = active_.size() <= FEW_PEERS;
    for (size_t i = 0; i < active_.size();) {  // an event may append to it
        Peer& peer = *active_[i];
        if (few) {
            moved |= write(peer);
            if (peer.readable()) moved |= read(peer, events);
        }
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
    for (Peer* peer : std::exchange(lost_, {})) {
        moved = true;
        events.peer_lost(peer->rank, peer->failure);
    }
    return moved;
}

void SocketLink::sleep(uint64_t ns) {
    // epoll_wait counts milliseconds, and epoll_pwait2 needs Linux 5.11.
    pollfd ready[]{{epoll_.fd, POLLIN, 0}, {wake_up_.fd, POLLIN, 0}};
    const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    ppoll(ready, std::size(ready), &timeout, nullptr);
    eventfd_t wake_ups;
    if (ready[1].revents) eventfd_read(wake_up_.fd, &wake_ups);
}

void SocketLink::wake() { eventfd_write(wake_up_.fd, 1); }

bool SocketLink::has_room(int peer) const { return peers_[peer].queued < MAX_QUEUED; }

bool SocketLink::has_queued(int peer) const { return !peers_[peer].queue.empty(); }

void SocketLink::abandon() {
    for (int r = 0; r < size; ++r) peers_[r].close();
    epoll_.close();
    wake_up_.close();
}

bool SocketLink::flushed() const {
    for (int r = 0; r < size; ++r) {
        const Peer& peer = peers_[r];
        int unacknowledged = 0;
        if (!peer.queue.empty()) return false;
        if (peer.open() && ioctl(peer.fd, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged) return false;
    }
    return true;
}

// Sends up to a piece; returns whether anything moved.
bool SocketLink::write(Peer& peer) {
    size_t moved = 0;
    while (!peer.queue.empty() && moved < PIECE) {
        Send& frame = peer.queue.front();
        const size_t head = sizeof frame.header - frame.header_sent, piece = std::min(frame.left, PIECE);
        iovec parts[]{{reinterpret_cast<std::byte*>(&frame.header) + frame.header_sent, head},
                      {const_cast<std::byte*>(frame.next), piece}};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = 2;
        const ssize_t sent = sendmsg(peer.fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) {
            peer.failure = strerror(errno);
            fail_sends(peer);
            return true;
        }
        moved += sent;
        const size_t of_header = std::min<size_t>(sent, head), of_payload = sent - of_header;
        frame.header_sent += of_header;
        frame.next += of_payload;
        frame.left -= of_payload;
        peer.queued -= of_payload;
        if (of_header < head || of_payload < piece) break;  // there is no more room
        if (frame.left == 0) {
            finish(frame.transfer, LinkTransfer::DONE);
            peer.queue.pop_front();
        }
    }
    if (peer.queue.empty() && peer.watched) watch(peer, false);
    return moved > 0;
}

// Takes up to a piece; returns whether anything moved.
bool SocketLink::read(Peer& peer, LinkEvents& events) {
    size_t moved = 0;
    while (peer.open() && moved < PIECE) {
        // A payload goes to its target, and what follows it into read_ahead, which is empty while a payload arrives.
        iovec parts[2];
        int count = 0;
        size_t direct = 0, ahead = 0;
        if (peer.current && peer.current->target) {
            direct = std::min(peer.current->missing(), PIECE);
            parts[count++] = {peer.current->target + peer.current->arrived, direct};
        }
        if (direct < PIECE) {
            ahead = READ_AHEAD - peer.held;
            parts[count++] = {peer.read_ahead + peer.held, ahead};
        }
        const ssize_t got = readv(peer.fd, parts, count);  // faster than recvmsg
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN && peer.failure.empty()) break;
        if (got <= 0) {
            if (got < 0 && errno != EAGAIN && peer.failure.empty()) peer.failure = strerror(errno);
            lose(peer, peer.failure.empty() ? "closed the connection" : peer.failure);
            return true;
        }
        moved += got;
        const size_t of_target = std::min<size_t>(got, direct);
        peer.held += got - of_target;
        if (direct) peer.current->arrived += of_target;
        if (!parse(peer, events) || size_t(got) < direct + ahead) break;
    }
    return moved > 0;
}

// Takes apart what has been read; returns false if the peer is lost.
bool SocketLink::parse(Peer& peer, LinkEvents& events) {
    size_t taken = 0;
    for (;;) {
        if (peer.current) {
            Receive& frame = *peer.current;
            const size_t bytes = std::min(frame.missing(), peer.held - taken);
            if (frame.target) std::copy_n(peer.read_ahead + taken, bytes, frame.target + frame.arrived);
            frame.arrived += bytes;
            taken += bytes;
            if (frame.missing()) break;
            end_payload(peer, events);
        } else {
            FrameHeader header;
            if (peer.held - taken < sizeof header) break;
            std::memcpy(&header, peer.read_ahead + taken, sizeof header);
            taken += sizeof header;
            if (header.tag == PACKET && header.bytes <= std::min(MAX_PACKET, peer.held - taken)) {  // all of it is here
                const std::span packet(peer.read_ahead + taken, header.bytes);
                taken += header.bytes;
                events.packet_arrived(peer.rank, packet);
            } else {
                begin_payload(peer, header.tag, header.bytes);
            }
        }
        if (!peer.open()) return false;
    }
    peer.held -= taken;
    std::memmove(peer.read_ahead, peer.read_ahead + taken, peer.held);
    return true;
}

void SocketLink::begin_payload(Peer& peer, uint64_t tag, uint64_t bytes) {
    const bool packet = tag == PACKET;
    const auto found = packet ? peer.waiting.end() : peer.find(tag);
    if (found != peer.waiting.end() && found->second->kind == Receive::POSTED) {
        if (found->second->bytes != bytes) return lose(peer, length_mismatch(bytes, found->second->bytes));
        peer.current = std::move(found->second);
        peer.waiting.erase(found);
        return;
    }
    const size_t room = packet ? MAX_PACKET : MAX_EARLY - std::min(peer.early, MAX_EARLY);
    auto memory = std::unique_ptr<std::byte[]>(bytes <= room ? new (std::nothrow) std::byte[bytes] : nullptr);
    if (!memory) return lose(peer, format("sent %" PRIu64 " bytes, for which there is no room", bytes));
    peer.current = std::make_shared<Receive>(packet ? Receive::OF_PACKET : Receive::EARLY, std::move(memory), bytes);
    if (packet) return;
    peer.waiting.emplace(tag, peer.current);
    peer.early += peer.current->cost();
}

void SocketLink::end_payload(Peer& peer, LinkEvents& events) {
    const auto frame = std::exchange(peer.current, nullptr);
    if (frame->kind == Receive::OF_PACKET) {
        events.packet_arrived(peer.rank, {frame->memory.get(), frame->bytes});
    } else if (frame->kind == Receive::POSTED) {
        --peer.awaited;
        finish(frame->transfer, LinkTransfer::DONE);
    }
}

// Serves the sockets that epoll finds ready.
bool SocketLink::poll(LinkEvents& events) {
    epoll_event ready[64];
    const int count = epoll_wait(epoll_.fd, ready, std::size(ready), 0);
    bool moved = false;
    for (int i = 0; i < count; ++i) {
        Peer& peer = peers_[ready[i].data.u32];
        if (ready[i].events & EPOLLOUT) moved |= write(peer);
        if (ready[i].events & ~EPOLLOUT) moved |= read(peer, events);
    }
    if (const auto now = Clock::now(); now >= next_check_) {
        next_check_ = now + keepalive_ / 4;
        check_hosts();
    }
    return moved;
}

// TCP itself gives up after a quarter of an hour. TCP_USER_TIMEOUT would also end the connection to a process that does
// not read because it computes, whose host still acknowledges every probe.
void SocketLink::check_hosts() {
    for (int r = 0; r < size; ++r) {
        Peer& peer = peers_[r];
        tcp_info info{};
        socklen_t bytes = sizeof info;
        if (!peer.open() || getsockopt(peer.fd, IPPROTO_TCP, TCP_INFO, &info, &bytes)) continue;
        const bool unanswered = std::max(info.tcpi_retransmits, info.tcpi_probes) > 1;
        if (unanswered && info.tcpi_last_ack_recv >= keepalive_.count()) lose(peer, strerror(ETIMEDOUT));
    }
}

void SocketLink::watch(Peer& peer, bool writable) {
    epoll_event event{.events = writable ? EPOLLIN | EPOLLOUT : EPOLLIN, .data = {.u32 = uint32_t(peer.rank)}};
    epoll_ctl(epoll_.fd, EPOLL_CTL_MOD, peer.fd, &event);
    peer.watched = writable;
}

void SocketLink::activate(Peer& peer) {
    if (!peer.active) active_.push_back(&peer);
    peer.active = true;
}

void SocketLink::fail_sends(Peer& peer) {
    for (Send& frame : peer.queue) finish(frame.transfer, LinkTransfer::FAILED);
    peer.queue.clear();
    peer.queued = 0;
}

void SocketLink::lose(Peer& peer, const std::string& reason) {
    if (!peer.open()) return;
    peer.close();
    peer.failure = reason;
    lost_.push_back(&peer);
    fail_sends(peer);
    if (peer.current) finish(peer.current->transfer, LinkTransfer::FAILED);
    for (auto entry = peer.waiting.begin(); entry != peer.waiting.end();) {
        Receive& receive = *entry->second;
        finish(receive.transfer, LinkTransfer::FAILED);
        entry = receive.kind == Receive::POSTED || receive.missing() ? peer.waiting.erase(entry) : std::next(entry);
    }
    peer.current = nullptr;
    peer.awaited = 0;
}

}  // namespace ringcomm
