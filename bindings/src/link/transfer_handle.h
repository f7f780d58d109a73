// What the handles of a SocketLink's transfers point to: something to send, or a receive.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "link/link.h"

namespace ringcomm {

struct TransferHandle {
    explicit TransferHandle(LinkTransfer* transfer) {
        if (transfer) wait_for(*transfer);
    }
    void wait_for(LinkTransfer& waiter) {
        transfer = &waiter;
        transfer->handle = this;
    }
    // Both sides stay in step: what is canceled is still sent, from a copy, or taken out of the stream.
    virtual void release_memory() = 0;

    void finish(LinkTransfer::State state) { LinkTransfer::end(transfer, state); }

    LinkTransfer* transfer = nullptr;  // nullptr: the caller does not wait for it

protected:
    ~TransferHandle() = default;
};

// A receive without a frame, a frame without a receive, or both.
struct Receive final : TransferHandle {
    enum Kind { POSTED, EARLY, OF_PACKET, OF_DROPPED };

    Receive(LinkTransfer* transfer, std::byte* target, size_t bytes)
        : TransferHandle(transfer), kind(POSTED), target(target), bytes(bytes) {}
    Receive(Kind kind, std::unique_ptr<std::byte[]> memory, size_t bytes)
        : TransferHandle(nullptr), kind(kind), target(memory.get()), bytes(bytes), memory(std::move(memory)) {}

    void release_memory() override { target = nullptr; }
    size_t missing() const { return bytes - arrived; }
    size_t cost() const { return sizeof *this + bytes; }

    Kind kind;
    std::byte* target;  // nullptr: canceled; the payload is discarded
    const size_t bytes;
    size_t arrived = 0;
    std::unique_ptr<std::byte[]> memory;
};

}  // namespace ringcomm
