// One open send, receive or probe.
#pragma once

#include <cinttypes>

#include "core/signature.h"
#include "cuda/messages.h"
#include "kernels/cpu/kernels.h"
#include "p2p/engine.h"

namespace ringcomm {

// What the request of an array on a GPU has beside others.
struct GpuRequest {
    CUstream stream = nullptr;  // of its launches; null: one of the communicator, chosen when a message is matched
    GpuEvent begin, end;        // before the first launch, if that is on another stream; after the last one
    uint64_t launch = 0;        // the last one
    GpuBuffer buffer;           // a message to this rank itself
    bool batch = false;         // launched together with others
    bool copies = false;        // its end is that of copies: `end`
};

// A message on the way from a GPU to the host.
struct CopyToHost {
    struct Chunk {
        GpuBuffer memory;
        GpuEvent copied;
        size_t bytes;
    };
    std::deque<Chunk> chunks;      // that are being copied, or there
    size_t queued = 0, begin = 0;  // bytes that are copied, or have been; before the first of the chunks
    size_t ready = 0;              // bytes up to the end of the first chunk, while it is sent
};

struct PointToPointEngine::Request {
    explicit Request(const rc_transfer& given)
        : sends(ringcomm::sends(given.kind)),
          transfer(given),
          data(static_cast<std::byte*>(given.data)),
          bytes(given.count * dtype_bytes(given.dtype)) {
        if (given.on_gpu) gpu = std::make_unique<GpuRequest>();
    }

    // With copies of what belongs to the caller.
    Request(const Request& sent, const rc_transfer& transfer, std::byte* data)
        : sends(true), transfer(transfer), data(data), bytes(sent.bytes), start(sent.start), buffered(true) {}

    // It has ended, and begins again.
    void restart() {
        bytes = transfer.count * dtype_bytes(transfer.dtype);
        message = NO_MESSAGE;
        location = moved = 0;
        failure.reset();
        done.store(false, std::memory_order_relaxed);
    }
    bool is_done() const { return done.load(std::memory_order_acquire); }
    void check_result() const {
        if (failure) throw *failure;
    }
    bool any_tag() const { return transfer.tag == RC_ANY_TAG && transfer.kind >= RC_RECV_MESSAGE; }
    // The bytes that DATA packets can carry by now, and where the next one is.
    size_t sendable() const { return to_host ? to_host->ready : bytes; }
    const std::byte* next_byte() const {
        return to_host ? to_host->chunks.front().memory.get() + (moved - to_host->begin) : data + moved;
    }
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
    // Receive: the payload in the sender's memory; 0: it comes in DATA packets. Send: where it is on the GPU.
    uint64_t location = 0;
    size_t moved = 0;                     // bytes of the payload
    std::shared_ptr<AsyncRequest> async;  // keeps an asynchronous request alive until it is done
    std::unique_ptr<Failure> failure;
    std::unique_ptr<GpuRequest> gpu;      // of an array on a GPU
    std::unique_ptr<CopyToHost> to_host;  // of a message from a GPU to host memory
    std::atomic<bool> done{false};
    AsyncRequest* owner = nullptr;  // of an asynchronous request
    const bool buffered = false;    // a send whose caller has returned
    bool polls = false;             // a probe that does not wait
    bool urgent = false;            // see is_urgent()
};

// A send that the engine owns, with a copy of its payload; without one if that is in a slot on the GPU.
struct PointToPointEngine::BufferedSend {
    explicit BufferedSend(const Request& sent)
        : payload(sent.data, sent.data + sent.bytes),
          transfer(sent.transfer),
          request(sent, transfer, payload.data()) {}
    BufferedSend(const Request& sent, std::nullptr_t) : transfer(sent.transfer), request(sent, transfer, nullptr) {}

    std::vector<std::byte> payload;
    const rc_transfer transfer;
    Request request;
};

class PointToPointEngine::AsyncRequest final : public Work, public std::enable_shared_from_this<AsyncRequest> {
public:
    AsyncRequest(PointToPointEngine& engine, const rc_transfer& given)
        : transfer(given), request(transfer), engine_(engine) {
        request.owner = this;
    }
    // Under the engine's lock: its last end may still be under way.
    void open() {
        if (done()) {
            restart();
            request.restart();
        }
        request.async = shared_from_this();
    }
    void wait(PeerGroup&, uint64_t deadline) override {
        if (request.gpu) engine_.coalesce(false);
        engine_.wait(request, deadline);
        if (request.gpu) engine_.wait_end(*this, deadline);
    }
    void wait_launched(PeerGroup&, uint64_t deadline) override {
        engine_.coalesce(false);
        engine_.wait(request, deadline);
        if (request.failure) engine_.wait_end(*this, UINT64_MAX);
    }
    bool launched() const override { return request.is_done(); }
    void order(void* stream) override { engine_.order(request, stream); }
    bool cancel() override { return engine_.cancel(request); }
    void advance() override { engine_.advance(); }
    void detach() override { engine_.detach(); }

    const rc_transfer transfer;
    Request request;

private:
    PointToPointEngine& engine_;
};

}  // namespace ringcomm
