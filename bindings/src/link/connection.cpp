// Connection: sends queue up, receives wait for their frames.
#include "link/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <new>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

// The longest payload that one system call moves. Sends and receives alternate in such pieces: with larger ones the
// data leaves the caches in between, and an exchange of 16 MiB falls from 1.9 to 0.7 GB/s.
constexpr size_t PIECE = 32 << 10;
constexpr size_t MAX_FRAME = size_t{1} << 30;  // far more than any that this library sends

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

}  // namespace

void Descriptor::close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
}

// What the handle of a transfer points to.
struct Connection::Operation {
    LinkTransfer* transfer;  // nullptr: the caller does not wait for it
    const bool sends;
};

struct Connection::Send : Operation {
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
struct Connection::Receive : Operation {
    enum Kind { POSTED, EARLY, OF_PACKET, OF_DROPPED };

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

Connection::Connection(int rank, int fd, std::vector<Connection*>& lost)
    : Descriptor(fd), rank(rank), awaits_socket_(fd < 0), lost_(lost) {}

Connection::~Connection() = default;

void Connection::begin(int socket) {
    fd = socket;
    awaits_socket_ = false;
}

Connection::Waiting::iterator Connection::find(uint64_t tag) {
    const auto found = waiting_.lower_bound(tag);
    return found != waiting_.end() && found->first == tag ? found : waiting_.end();
}

// --- Transfers -------------------------------------------------------------------------------------------------------

void Connection::send(uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != PACKET);
    LinkTransfer* waiter = &transfer;
    transfer.state = LinkTransfer::ACTIVE;
    if (!can_send()) return finish(waiter, LinkTransfer::FAILED);
    const bool first = !has_queued();
    transfer.handle = static_cast<Operation*>(&transfers_.emplace_back(tag, data, bytes, waiter));
    queued_ += bytes;
    if (first) write();
}

void Connection::send_packet(std::span<const std::byte> packet) {
    if (!can_send()) return;
    const bool first = !begun_ && packets_.empty();
    packets_.emplace_back(PACKET, packet.data(), packet.size(), nullptr);
    queued_ += packet.size();
    if (first) write();
    if (!packets_.empty()) packets_.back().keep_rest();
}

void Connection::receive(uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != PACKET);
    transfer.state = LinkTransfer::ACTIVE;
    LinkTransfer* waiter = &transfer;
    const auto found = find(tag);
    if (found == waiting_.end() || found->second->kind == Receive::POSTED) {
        if (!(open() || awaits_socket_) || dropped_.contains(tag)) return finish(waiter, LinkTransfer::FAILED);
        const auto receive = std::make_shared<Receive>(waiter, data, bytes);
        transfer.handle = static_cast<Operation*>(receive.get());
        waiting_.emplace(tag, receive);
        ++awaited_;
        return;
    }
    const auto frame = found->second;
    waiting_.erase(found);
    early_ -= frame->cost();
    if (frame->bytes != bytes) {
        finish(waiter, LinkTransfer::FAILED);
        return lose(length_mismatch(frame->bytes, bytes));
    }
    std::copy_n(frame->memory.get(), frame->arrived, data);
    if (frame->missing() == 0) return finish(waiter, LinkTransfer::DONE);
    frame->kind = Receive::POSTED;
    frame->target = data;
    frame->memory.reset();
    frame->transfer = waiter;
    transfer.handle = static_cast<Operation*>(frame.get());
    ++awaited_;
}

void Connection::cancel(LinkTransfer& transfer) {
    if (transfer.ended()) return;
    auto& operation = *static_cast<Operation*>(transfer.handle);
    // Both sides stay in step: a send is still sent, a receive takes its frame out of the stream.
    if (operation.sends) {
        static_cast<Send&>(operation).keep_rest();
    } else {
        static_cast<Receive&>(operation).target = nullptr;
    }
    finish(operation.transfer, LinkTransfer::FAILED);
}

void Connection::drop(uint64_t tag) {
    dropped_.insert(tag);
    const auto [first, last] = waiting_.equal_range(tag);
    for (auto entry = first; entry != last; entry = waiting_.erase(entry)) {
        Receive& receive = *entry->second;
        finish(receive.transfer, LinkTransfer::FAILED);
        receive.target = nullptr;  // its payload may be arriving
        if (receive.kind == Receive::POSTED) {
            --awaited_;
        } else {
            early_ -= receive.cost();
        }
    }
}

// --- Frames ----------------------------------------------------------------------------------------------------------

Connection::Send* Connection::next_frame() {
    if (begun_) return begun_;
    std::deque<Send>& queue = packets_.empty() ? transfers_ : packets_;
    return queue.empty() ? nullptr : &queue.front();
}

// Sends up to a piece; returns whether anything moved.
bool Connection::write() {
    if (!open()) return false;
    size_t moved = 0;
    while (Send* const next = moved < PIECE ? next_frame() : nullptr) {
        Send& frame = *next;
        const size_t head = sizeof frame.header - frame.header_sent, piece = std::min(frame.left, PIECE);
        iovec parts[]{{reinterpret_cast<std::byte*>(&frame.header) + frame.header_sent, head},
                      {const_cast<std::byte*>(frame.next), piece}};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = 2;
        const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) {
            write_failed(errno);
            return true;
        }
        moved += sent;
        const size_t of_header = std::min<size_t>(sent, head), of_payload = sent - of_header;
        begun_ = next;
        frame.header_sent += of_header;
        frame.next += of_payload;
        frame.left -= of_payload;
        queued_ -= of_payload;
        if (of_header < head || of_payload < piece) break;  // there is no more room
        if (frame.left == 0) {
            finish(frame.transfer, LinkTransfer::DONE);
            (frame.header.tag == PACKET ? packets_ : transfers_).pop_front();
            begun_ = nullptr;
        }
    }
    return moved > 0;
}

// Takes up to a piece; returns whether anything moved.
bool Connection::read(LinkEvents& events) {
    size_t moved = 0;
    while (open() && moved < PIECE && !stalled()) {
        // A payload goes to its target, and what follows it into read_ahead, which is empty while a payload arrives.
        iovec parts[2];
        int count = 0;
        size_t direct = 0, ahead = 0;
        if (current_ && current_->target) {
            direct = std::min(current_->missing(), PIECE);
            parts[count++] = {current_->target + current_->arrived, direct};
        }
        if (direct < PIECE) {
            ahead = READ_AHEAD - held_;
            parts[count++] = {read_ahead_ + held_, ahead};
        }
        const ssize_t got = readv(fd, parts, count);  // faster than recvmsg
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN && failure_.empty()) break;
        if (got <= 0) {
            read_ended(got < 0 ? errno : 0);
            return true;
        }
        moved += got;
        const size_t of_target = std::min<size_t>(got, direct);
        held_ += got - of_target;
        if (direct) current_->arrived += of_target;
        if (!parse(events) || size_t(got) < direct + ahead) break;
    }
    return moved > 0;
}

// Takes apart what has been read; returns false if the peer is lost.
bool Connection::parse(LinkEvents& events) {
    size_t taken = 0;
    for (;;) {
        if (current_) {
            Receive& frame = *current_;
            const size_t bytes = std::min(frame.missing(), held_ - taken);
            if (frame.target) std::copy_n(read_ahead_ + taken, bytes, frame.target + frame.arrived);
            frame.arrived += bytes;
            taken += bytes;
            if (frame.missing()) break;
            end_payload(events);
        } else {
            FrameHeader header;
            if (held_ - taken < sizeof header) break;
            std::memcpy(&header, read_ahead_ + taken, sizeof header);
            taken += sizeof header;
            if (header.tag == PACKET &&
                header.bytes <= std::min(Link::MAX_PACKET, held_ - taken)) {  // all of it is here
                const std::span packet(read_ahead_ + taken, header.bytes);
                taken += header.bytes;
                events.packet_arrived(rank, packet);
            } else {
                begin_payload(header.tag, header.bytes);
            }
        }
        if (!open()) return false;
    }
    held_ -= taken;
    std::memmove(read_ahead_, read_ahead_ + taken, held_);
    return true;
}

void Connection::begin_payload(uint64_t tag, uint64_t bytes) {
    const bool packet = tag == PACKET;
    const auto found = packet ? waiting_.end() : find(tag);
    if (found != waiting_.end() && found->second->kind == Receive::POSTED) {
        if (found->second->bytes != bytes) return lose(length_mismatch(bytes, found->second->bytes));
        current_ = std::move(found->second);
        waiting_.erase(found);
        return;
    }
    if (dropped_.contains(tag)) {
        current_ = std::make_shared<Receive>(Receive::OF_DROPPED, nullptr, bytes);
        return;
    }
    const bool valid = bytes <= (packet ? Link::MAX_PACKET : MAX_FRAME);
    auto memory = std::unique_ptr<std::byte[]>(valid ? new (std::nothrow) std::byte[bytes] : nullptr);
    if (!memory) return lose(format("sent %" PRIu64 " bytes, for which there is no room", bytes));
    current_ = std::make_shared<Receive>(packet ? Receive::OF_PACKET : Receive::EARLY, std::move(memory), bytes);
    if (packet) return;
    waiting_.emplace(tag, current_);
    early_ += current_->cost();
}

void Connection::end_payload(LinkEvents& events) {
    const auto frame = std::exchange(current_, nullptr);
    if (frame->kind == Receive::OF_PACKET) {
        events.packet_arrived(rank, {frame->memory.get(), frame->bytes});
    } else if (frame->kind == Receive::POSTED) {
        --awaited_;
        finish(frame->transfer, LinkTransfer::DONE);
    }
}

void Connection::fail_sends() {
    for (Send& frame : transfers_) finish(frame.transfer, LinkTransfer::FAILED);
    transfers_.clear();
    packets_.clear();
    begun_ = nullptr;
    queued_ = 0;
}

void Connection::lose(const std::string& reason) {
    if (!open() && !awaits_socket_) return;
    awaits_socket_ = false;
    close();
    failure_ = reason;
    lost_.push_back(this);
    fail_sends();
    if (current_) finish(current_->transfer, LinkTransfer::FAILED);
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
        Receive& receive = *entry->second;
        finish(receive.transfer, LinkTransfer::FAILED);
        entry = receive.kind == Receive::POSTED || receive.missing() ? waiting_.erase(entry) : std::next(entry);
    }
    current_ = nullptr;
    awaited_ = 0;
}

}  // namespace ringcomm
