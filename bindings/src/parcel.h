// One send or receive that is not done.
#pragma once

#include <cinttypes>

#include "letters.h"

namespace ringcomm {

struct Letters::Parcel {
    Parcel(bool sends, const Message& message)
        : sends(sends), message(message), bytes(message.count * dtype_bytes(message.dtype)) {}

    bool is_done() const { return done.load(std::memory_order_acquire); }
    void result() const {
        if (failure) throw *failure;
    }
    // Whether a receive is for what came from there.
    bool takes(int from, const Heading& heading) const {
        return message.tag == heading.tag && (message.peer < 0 || message.peer == from);
    }
    uint64_t signature() const { return pack(sends ? CALL_SEND : CALL_RECV, message.dtype, 0, message.peer, false); }
    std::string words() const {
        return describe(signature(), message.count) + format(" with tag %" PRId64, message.tag);
    }

    const bool sends;
    const Message message;
    const size_t bytes;
    int source = -1;  // of a receive, once matched
    uint64_t start = 0, flight = 0;
    uint64_t number = 0;   // of the offer
    uint64_t address = 0;  // of a receive: where its payload lies in the memory of the source; 0: it comes in pieces
    size_t moved = 0;      // bytes of the payload
    std::shared_ptr<Posted> posted;  // in the background: itself, until it is done
    std::unique_ptr<Failure> failure;
    std::atomic<bool> done{false};
};

class Letters::Posted final : public Work {
public:
    Posted(Letters& letters, bool sends, const Message& message) : parcel(sends, message), letters_(letters) {}
    void wait(Comm&, uint64_t deadline) override { letters_.wait(parcel, deadline); }

    Parcel parcel;

private:
    Letters& letters_;
};

}  // namespace ringcomm
