// Connection: sends queue up, receives wait for their frames.
#include "link/connection.h"

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

constexpr size_t MAX_FRAME = size_t{1} << 30;  // far more than any that this library sends

std::string length_mismatch(uint64_t sent, uint64_t received) {
    return format("sent %" PRIu64 " bytes to a receive of %" PRIu64, sent, received);
}

}  // namespace

void Connection::begin(std::unique_ptr<ByteStream> stream) {
    stream_ = std::move(stream);
    awaits_socket_ = false;
}

Connection::Waiting::iterator Connection::find(uint64_t tag) {
    const auto found = waiting_.lower_bound(tag);
    return found != waiting_.end() && found->first == tag ? found : waiting_.end();
}

// --- Transfers -------------------------------------------------------------------------------------------------------

void Connection::send(uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != FrameHeader::PACKET);
    transfer.state = can_send() ? LinkTransfer::ACTIVE : LinkTransfer::FAILED;
    if (transfer.ended()) return;
    const bool first = sends_.empty();
    if (flows_.can_carry(bytes)) {
        flows_.send(data, bytes, transfer);
        sends_.add_transfer({FrameHeader::ON_FLOW, tag, bytes});
    } else {
        sends_.add_transfer({FrameHeader::PAYLOAD, tag, bytes}, {data, bytes}, &transfer);
    }
    if (first) write();
}

void Connection::send_packet(std::span<const std::byte> packet) {
    if (!can_send()) return;
    const bool first = sends_.packet_would_be_next();
    sends_.add_packet({FrameHeader::PAYLOAD, FrameHeader::PACKET, packet.size()}, packet);
    if (first) write();
    sends_.copy_last_packet();
}

void Connection::receive(uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != FrameHeader::PACKET);
    const auto found = find(tag);
    if (found == waiting_.end() || found->second->kind == Receive::POSTED) {
        const bool may_come = (open() || awaits_socket_) && !dropped_.contains(tag);
        transfer.state = may_come ? LinkTransfer::ACTIVE : LinkTransfer::FAILED;
        if (!may_come) return;
        waiting_.emplace(tag, std::make_shared<Receive>(&transfer, data, bytes));
        ++awaited_;
        return;
    }
    const auto frame = found->second;
    waiting_.erase(found);
    early_ -= frame->cost();
    if (frame->bytes != bytes) {
        transfer.state = LinkTransfer::FAILED;
        return lose(length_mismatch(frame->bytes, bytes));
    }
    std::copy_n(frame->memory.get(), frame->arrived, data);
    transfer.state = frame->missing() ? LinkTransfer::ACTIVE : LinkTransfer::DONE;
    if (transfer.ended()) return;
    frame->kind = Receive::POSTED;
    frame->target = data;
    frame->memory.reset();
    frame->wait_for(transfer);
    ++awaited_;
}

void Connection::cancel(LinkTransfer& transfer) {
    if (transfer.ended()) return;
    auto& handle = *static_cast<TransferHandle*>(transfer.handle);
    handle.release_memory();
    handle.finish(LinkTransfer::FAILED);
}

void Connection::drop(uint64_t tag) {
    dropped_.insert(tag);
    const auto [first, last] = waiting_.equal_range(tag);
    for (auto entry = first; entry != last; entry = waiting_.erase(entry)) {
        Receive& receive = *entry->second;
        receive.finish(LinkTransfer::FAILED);
        receive.target = nullptr;  // its payload may be arriving
        if (receive.kind == Receive::POSTED) {
            --awaited_;
        } else {
            early_ -= receive.cost();
        }
    }
}

// --- Frames ----------------------------------------------------------------------------------------------------------

bool Connection::write() {
    if (!open()) return false;
    const auto [moved, code] = sends_.write(*stream_);
    if (code) write_failed(code);
    return moved;
}

// Takes up to a piece; returns whether anything moved.
bool Connection::read(LinkEvents& events) {
    size_t moved = 0;
    while (open() && moved < PIECE && !stalled()) {
        // A payload goes to its target, and what follows it into read_ahead, which is empty while a payload arrives.
        iovec parts[2];
        size_t count = 0;
        size_t direct = 0, ahead = 0;
        if (current_ && current_->target) {
            direct = std::min(current_->missing(), PIECE);
            parts[count++] = {current_->target + current_->arrived, direct};
        }
        if (direct < PIECE) {
            ahead = READ_AHEAD - held_;
            parts[count++] = {read_ahead_ + held_, ahead};
        }
        const ssize_t got = stream_->read({parts, count});
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
            if (header.tag == FrameHeader::PACKET &&
                header.kind_and_bytes <= std::min(Link::MAX_PACKET, held_ - taken)) {  // all of it is here
                const std::span packet(read_ahead_ + taken, header.bytes());
                taken += header.bytes();
                events.packet_arrived(rank, packet);
            } else if (header.kind() == FrameHeader::ARRIVED) {
                flows_.acknowledged(header.tag);
            } else if (header.kind() == FrameHeader::ON_FLOW && header.tag != FrameHeader::PACKET) {
                begin_payload(header.tag, header.bytes());
                if (current_) flows_.expect(std::exchange(current_, nullptr));
            } else if (header.kind() == FrameHeader::ORPHAN && flows_.announced(header.tag)) {
                begin_orphan(header.tag, header.bytes());
            } else {
                begin_payload(header.tag, header.kind_and_bytes);
            }
        }
        if (!open()) return false;
    }
    held_ -= taken;
    std::memmove(read_ahead_, read_ahead_ + taken, held_);
    return true;
}

void Connection::begin_payload(uint64_t tag, uint64_t bytes) {
    const bool packet = tag == FrameHeader::PACKET;
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
    } else {
        end_transfer(*frame);
    }
}

void Connection::end_transfer(Receive& receive) {
    if (receive.kind != Receive::POSTED) return;
    --awaited_;
    receive.finish(LinkTransfer::DONE);
}

// --- Flows -----------------------------------------------------------------------------------------------------------

bool Connection::write_flow(size_t flow) {
    const bool moved = flows_.write(flow);
    carry_orphans();
    return moved;
}

bool Connection::read_flow(size_t flow) {
    const bool moved = flows_.read(flow);
    for (const auto& [number, receive] : flows_.take_arrived()) {
        end_transfer(*receive);
        acknowledge(number);
    }
    carry_orphans();
    return moved;
}

void Connection::acknowledge(uint64_t number) {
    if (!can_send()) return;
    const bool first = sends_.packet_would_be_next();
    sends_.add_packet({FrameHeader::ARRIVED, number, 0});
    if (first) write();
}

void Connection::carry_orphans() {
    for (Flows::Orphan& orphan : flows_.take_orphans()) {
        sends_.add_transfer({FrameHeader::ORPHAN, orphan.number, orphan.bytes}, {orphan.data, orphan.bytes},
                            orphan.transfer, std::move(orphan.copy));
    }
}

void Connection::begin_orphan(uint64_t number, uint64_t bytes) {
    current_ = flows_.take_expected(number);
    if (!current_) {
        current_ = std::make_shared<Receive>(Receive::OF_DROPPED, nullptr, bytes);
    } else if (current_->bytes != bytes) {
        const uint64_t expected = current_->bytes;
        lose(length_mismatch(bytes, expected));
    }
}

void Connection::fail_sends() {
    sends_.fail();
    flows_.fail_sends();
}

void Connection::lose(const std::string& reason) {
    if (!open() && !awaits_socket_) return;
    awaits_socket_ = false;
    stream_.reset();
    failure_ = reason;
    lost_.push_back(this);
    fail_sends();
    flows_.fail();
    if (current_) current_->finish(LinkTransfer::FAILED);
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
        Receive& receive = *entry->second;
        receive.finish(LinkTransfer::FAILED);
        entry = receive.kind == Receive::POSTED || receive.missing() ? waiting_.erase(entry) : std::next(entry);
    }
    current_ = nullptr;
    awaited_ = 0;
}

void Connection::abandon() {
    ringcomm::abandon(stream_);
    flows_.abandon();
}

}  // namespace ringcomm
