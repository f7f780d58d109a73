// The frames that a Connection has to send. Packets go before transfers that have not begun: one of them may ask the
// peer for data that could come meanwhile.
#pragma once

#include <deque>
#include <memory>
#include <span>

#include "link/byte_stream.h"
#include "link/frame.h"
#include "link/transfer_handle.h"

namespace ringcomm {

class SendQueue {
public:
    bool empty() const { return packets_.empty() && transfers_.empty(); }
    bool has_packets() const { return !packets_.empty(); }
    bool packet_would_be_next() const { return !begun_ && packets_.empty(); }
    size_t bytes() const { return bytes_; }  // of payload

    // What add_transfer() sends is the caller's, until the transfer has ended, or is the copy.
    void add_transfer(FrameHeader header, std::span<const std::byte> payload = {}, LinkTransfer* transfer = nullptr,
                      std::unique_ptr<std::byte[]> copy = nullptr);
    void add_packet(FrameHeader header, std::span<const std::byte> payload = {});
    void copy_last_packet();  // unless it has been sent

    // Sends up to a piece, and all packets. `code`: errno of a failure, or 0.
    struct Written {
        bool moved;
        int code;
    };
    Written write(ByteStream& stream);
    void fail();

private:
    struct Frame final : TransferHandle {
        Frame(FrameHeader header, std::span<const std::byte> payload, LinkTransfer* transfer)
            : TransferHandle(transfer), header(header), next(payload.data()), left(payload.size()) {}
        void release_memory() override;

        FrameHeader header;
        size_t header_sent = 0;
        const std::byte* next;
        size_t left;
        std::unique_ptr<std::byte[]> copy;
    };
    using Frames = std::deque<Frame>;  // its elements stay where they are

    Frames* next_frames();

    Frames packets_, transfers_;
    Frames* begun_ = nullptr;  // the rest of its first frame comes next
    size_t bytes_ = 0;
};

}  // namespace ringcomm
