// One open send, receive or probe: what the engine knows of it.
#pragma once

#include <atomic>
#include <cinttypes>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/signature.h"
#include "core/work.h"
#include "kernels/cpu/kernels.h"
#include "p2p/channel.h"

#include "ringcomm.h"

namespace ringcomm {

class AsyncRequest;
struct GpuRequest;

constexpr bool sends(int kind) { return kind <= RC_SEND_SYNCHRONOUS; }

// Owned by the caller, who waits for it, or by an AsyncRequest or a BufferedSend.
struct Request {
    explicit Request(const rc_transfer& given)
        : sends(ringcomm::sends(given.kind)),
          transfer(given),
          data(static_cast<std::byte*>(given.data)),
          bytes(given.count * dtype_bytes(given.dtype)) {}

    // With copies of what belongs to the caller.
    Request(const Request& sent, const rc_transfer& transfer, std::byte* data)
        : sends(true), transfer(transfer), data(data), bytes(sent.bytes), start(sent.start), buffered(true) {}

    // It has ended, and begins again.
    void restart() {
        bytes = transfer.count * dtype_bytes(transfer.dtype);
        message = NO_MESSAGE;
        location = moved = 0;
        sendable = {};
        failure.reset();
        done.store(false, std::memory_order_relaxed);
    }
    bool is_done() const { return done.load(std::memory_order_acquire); }
    void check_result() const {
        if (failure) throw *failure;
    }
    bool any_tag() const { return transfer.tag == RC_ANY_TAG && transfer.kind >= RC_RECV_MESSAGE; }
    bool matches(int from, const PacketHeader& header) const {
        const bool tag_fits = transfer.tag == header.tag || (any_tag() && header.tag != RC_OBJECT_TAG);
        return tag_fits && (transfer.peer < 0 || transfer.peer == from);
    }
    int call() const {
        constexpr int calls[] = {CALL_SEND,         CALL_SEND,     CALL_RECV,  CALL_RECV,
                                 CALL_RECV_MESSAGE, CALL_RECV_ANY, CALL_PROBE, CALL_PROBE};
        static_assert(std::size(calls) == RC_TRANSFER_KINDS);
        return calls[transfer.kind];
    }
    // Whether the message is set apart, rather than received.
    bool takes(const PacketHeader& header) const {
        return transfer.kind == RC_TAKE || (transfer.kind == RC_RECV_OR_TAKE && header.bytes > bytes);
    }
    // What is matched whatever its dtype is described in bytes.
    int described_dtype() const { return transfer.kind >= RC_RECV_MESSAGE ? RC_UINT8 : transfer.dtype; }
    uint64_t described_count() const {
        return transfer.kind >= RC_RECV_MESSAGE ? transfer.count * dtype_bytes(transfer.dtype) : transfer.count;
    }
    uint64_t signature() const { return signature_of(call(), described_dtype(), 0, transfer.peer, false); }
    // As the message turned out: a receive may take one of any source and length.
    int traced_call() const {
        if (transfer.kind != RC_RECV_OR_TAKE) return call();
        return message.source < 0 || message.taken ? CALL_PROBE : CALL_RECV_MESSAGE;
    }
    uint64_t traced_signature() const {
        return signature_of(traced_call(), described_dtype(), 0, transfer.peer < 0 ? message.source : transfer.peer,
                            false);
    }
    uint64_t traced_count() const {
        return message.source < 0 || traced_call() == CALL_PROBE ? described_count()
                                                                 : message.bytes / dtype_bytes(described_dtype());
    }
    std::string describe_call() const { return describe_message(signature(), described_count(), transfer.tag); }
    void set_message(int source, const PacketHeader& header) { message = {source, 0, header.tag, header.bytes, 0}; }
    void set_mismatch(int peer, const std::string& message, const std::string& expected, const std::string& got) {
        failure = std::make_unique<Failure>(RC_MISMATCH, message, peer, expected, got);
        failure->error.peer = peer;
    }

    const bool sends;
    const rc_transfer& transfer;      // of the caller, or beside an asynchronous or buffered request
    std::byte* const data;            // a send never writes through it
    size_t bytes;                     // of RC_RECV_MESSAGE: at most, until it is matched
    rc_message message = NO_MESSAGE;  // of a receive or probe, once matched
    uint64_t start = 0, flight = 0;
    uint64_t traced = 0;  // ticks(), when it began; 0: without a trace
    uint64_t number = 0;  // of the RTS
    // Receive: the payload in the sender's memory; 0: it comes in DATA packets. Send: that of its FIN.
    uint64_t location = 0;
    size_t moved = 0;                       // bytes of the payload
    std::span<const std::byte> sendable{};  // what DATA packets can carry by now
    std::shared_ptr<AsyncRequest> async;    // keeps an asynchronous request alive until it is done
    std::unique_ptr<Failure> failure;
    std::atomic<bool> done{false};
    AsyncRequest* owner = nullptr;  // of an asynchronous request
    const bool buffered = false;    // a send whose caller has returned
    bool polls = false;             // a probe that does not wait
    bool urgent = false;            // see is_urgent()
    GpuRequest* gpu = nullptr;      // of an array on a GPU (gpu.h); null: of host memory

    // While it is posted (matching.h).
    uint64_t order = 0;
    Request* next = nullptr;
};

// A send that the engine owns, with a copy of its payload.
struct BufferedSend {
    explicit BufferedSend(const Request& sent)
        : payload(sent.data, sent.data + sent.bytes),
          transfer(sent.transfer),
          request(sent, transfer, payload.data()) {}

    std::vector<std::byte> payload;
    const rc_transfer transfer;
    Request request;
};

}  // namespace ringcomm
