// One open send, receive or probe.
#pragma once

#include <cinttypes>

#include "core/signature.h"
#include "kernels/cpu/kernels.h"
#include "p2p/engine.h"

namespace ringcomm {

inline Transfer with_data(Transfer transfer, std::byte* data) {
    transfer.data = data;
    return transfer;
}

struct PointToPointEngine::Request {
    explicit Request(const Transfer& transfer)
        : sends(ringcomm::sends(transfer.kind)),
          transfer(transfer),
          bytes(transfer.count * dtype_bytes(transfer.dtype)) {}

    Request(const Request& sent, std::byte* copy)
        : sends(true), transfer(with_data(sent.transfer, copy)), bytes(sent.bytes), start(sent.start), buffered(true) {}

    bool is_done() const { return done.load(std::memory_order_acquire); }
    void check_result() const {
        if (failure) throw *failure;
    }
    bool any_tag() const { return transfer.tag == RC_ANY_TAG && transfer.kind >= TransferKind::RECV_MESSAGE; }
    bool matches(int from, const PacketHeader& header) const {
        return (transfer.tag == header.tag || any_tag()) && (transfer.peer < 0 || transfer.peer == from);
    }
    int call() const {
        constexpr int calls[] = {CALL_SEND, CALL_SEND, CALL_RECV, CALL_RECV, CALL_RECV_MESSAGE, CALL_PROBE, CALL_PROBE};
        return calls[int(transfer.kind)];
    }
    uint64_t signature() const { return signature_of(call(), transfer.dtype, 0, transfer.peer, false); }
    // As the message turned out: a receive may take one of any source and length.
    uint64_t traced_signature() const {
        return signature_of(call(), transfer.dtype, 0, transfer.peer < 0 ? message.source : transfer.peer, false);
    }
    uint64_t traced_count() const {
        return message.source < 0 || call() == CALL_PROBE ? transfer.count
                                                          : message.bytes / dtype_bytes(transfer.dtype);
    }
    std::string describe_call() const {
        const std::string tag = any_tag() ? "any tag" : format("tag %" PRId64, transfer.tag);
        return describe(signature(), transfer.count) + " with " + tag;
    }
    void set_message(int source, const PacketHeader& header) { message = {source, 0, header.tag, header.bytes}; }
    void set_mismatch(int peer, const std::string& message, const std::string& expected, const std::string& got) {
        failure = std::make_unique<Failure>(RC_MISMATCH, message, peer, expected, got);
        failure->error.peer = peer;
    }

    const bool sends;
    const Transfer transfer;
    size_t bytes;                     // of RECV_MESSAGE: at most, until it is matched
    rc_message message = NO_MESSAGE;  // of a receive or probe, once matched
    uint64_t taken = 0;               // the number of the message that TAKE has taken
    uint64_t start = 0, flight = 0;
    uint64_t traced = 0;                  // ticks(), when it began; 0: without a trace
    uint64_t number = 0;                  // of the RTS
    uint64_t location = 0;                // receive: the payload in the sender's memory; 0: it comes in DATA packets
    size_t moved = 0;                     // bytes of the payload
    std::shared_ptr<AsyncRequest> async;  // keeps an asynchronous request alive until it is done
    std::unique_ptr<Failure> failure;
    std::atomic<bool> done{false};
    const bool buffered = false;  // a send whose caller has returned
    bool polls = false;           // a probe that does not wait
};

// A send that the engine owns, with a copy of its payload.
struct PointToPointEngine::BufferedSend {
    explicit BufferedSend(const Request& sent)
        : payload(sent.transfer.data, sent.transfer.data + sent.bytes), request(sent, payload.data()) {}

    std::vector<std::byte> payload;
    Request request;
};

class PointToPointEngine::AsyncRequest final : public Work {
public:
    AsyncRequest(PointToPointEngine& engine, const Transfer& transfer) : request(transfer), engine_(engine) {}
    void wait(PeerGroup&, uint64_t deadline) override { engine_.wait(request, deadline); }
    bool cancel() override { return engine_.cancel(request); }
    void advance() override { engine_.advance(); }

    Request request;

private:
    PointToPointEngine& engine_;
};

}  // namespace ringcomm
