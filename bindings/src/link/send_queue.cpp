// SendQueue: which frame is next, and how much of it the socket takes.
#include "link/send_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ringcomm {

void SendQueue::Frame::release_memory() {
    copy = std::make_unique_for_overwrite<std::byte[]>(left);
    std::copy_n(next, left, copy.get());
    next = copy.get();
}

void SendQueue::add_transfer(FrameHeader header, std::span<const std::byte> payload, LinkTransfer* transfer,
                             std::unique_ptr<std::byte[]> copy) {
    transfers_.emplace_back(header, payload, transfer).copy = std::move(copy);
    bytes_ += payload.size();
}

void SendQueue::add_packet(FrameHeader header, std::span<const std::byte> payload) {
    packets_.emplace_back(header, payload, nullptr);
    bytes_ += payload.size();
}

void SendQueue::copy_last_packet() {
    if (!packets_.empty()) packets_.back().release_memory();
}

SendQueue::Frames* SendQueue::next_frames() {
    if (begun_) return begun_;
    Frames& frames = packets_.empty() ? transfers_ : packets_;
    return frames.empty() ? nullptr : &frames;
}

SendQueue::Written SendQueue::write(ByteStream& stream) {
    size_t moved = 0;
    while (Frames* const frames = moved < PIECE || !packets_.empty() ? next_frames() : nullptr) {
        Frame& frame = frames->front();
        const size_t head = sizeof frame.header - frame.header_sent, piece = std::min(frame.left, PIECE);
        const iovec parts[]{{reinterpret_cast<std::byte*>(&frame.header) + frame.header_sent, head},
                            {const_cast<std::byte*>(frame.next), piece}};
        const ssize_t sent = stream.write(parts);
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) return {true, errno};
        moved += sent;
        const size_t of_header = std::min<size_t>(sent, head), of_payload = sent - of_header;
        begun_ = frames;
        frame.header_sent += of_header;
        frame.next += of_payload;
        frame.left -= of_payload;
        bytes_ -= of_payload;
        if (of_header < head || of_payload < piece) break;  // there is no more room
        if (frame.left == 0) {
            frame.finish(LinkTransfer::DONE);
            frames->pop_front();
            begun_ = nullptr;
        }
    }
    return {moved > 0, 0};
}

void SendQueue::fail() {
    for (Frame& frame : transfers_) frame.finish(LinkTransfer::FAILED);
    transfers_.clear();
    packets_.clear();
    begun_ = nullptr;
    bytes_ = 0;
}

}  // namespace ringcomm
