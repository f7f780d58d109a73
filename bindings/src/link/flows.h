// The flows between two ranks: further connections, which carry large payloads side by side, where one connection does
// not fill the link, or where hosts have several addresses.
//
// The header of such a transfer travels over the Connection of the pair, and finds its receive there, in order. Its
// payload takes the first flow with room, so that a slow one takes fewer, and the last ones go to fast ones. The
// receiver acknowledges each payload; until then the sender keeps it: if a flow ends, others carry what it had, and if
// none is left, the Connection does.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link/byte_stream.h"
#include "link/transfer_handle.h"

namespace ringcomm {

class Flows {
public:
    static constexpr size_t LEAST_BYTES = 128 << 10;  // of a payload

    void add(std::unique_ptr<ByteStream> stream);
    bool can_carry(size_t bytes) const { return open_ && bytes >= LEAST_BYTES; }
    size_t open() const { return open_; }
    // Why flows have ended since the last call.
    std::vector<std::string> take_ended() { return std::exchange(ended_, {}); }

    // Payloads are numbered in the order of their headers.
    void send(const std::byte* data, size_t bytes, LinkTransfer& transfer);
    void acknowledged(uint64_t number);
    // After the header of the next payload.
    void expect(std::shared_ptr<Receive> receive);

    bool has_queued() const;
    bool has_unacknowledged() const { return !payloads_.empty(); }

    // Over one flow, up to a piece. Returns whether anything moved.
    bool write(size_t flow);
    bool read(size_t flow);
    // The payloads that have arrived since the last call.
    struct Arrived {
        uint64_t number;
        std::shared_ptr<Receive> receive;
    };
    std::vector<Arrived> take_arrived() { return std::exchange(arrived_, {}); }

    void end_if_silent(double idle_timeout, double resend_timeout);
    // Where no flow is left: the payloads that have not been acknowledged, for the connection to carry.
    struct Orphan {
        uint64_t number;
        const std::byte* data;
        size_t bytes;
        LinkTransfer* transfer;
        std::unique_ptr<std::byte[]> copy;
    };
    std::vector<Orphan> take_orphans();
    bool announced(uint64_t number) const { return number < announced_; }  // its header has come
    // The receive of such a payload; null where it has come over a flow.
    std::shared_ptr<Receive> take_expected(uint64_t number);
    void fail_sends();
    void fail();
    void abandon();  // in a forked child

    // For epoll.
    size_t size() const { return flows_.size(); }
    int descriptor(size_t flow) const;
    bool holds_received() const;  // that can be taken
    bool waits_for_header(size_t flow) const;
    bool waits_for_room(size_t flow) const;

private:
    struct Header {
        uint64_t number;
        uint32_t bytes, attempt;  // the later of two that carry a payload counts
    };
    struct Flow;

    struct Payload final : TransferHandle {
        Payload(uint64_t number, const std::byte* data, size_t bytes, LinkTransfer* transfer)
            : TransferHandle(transfer), header{number, uint32_t(bytes), 0}, data(data) {}
        void release_memory() override;

        Header header;
        const std::byte* data;
        std::unique_ptr<std::byte[]> copy;
        const Flow* flow = nullptr;  // which carries it
        bool acknowledged = false;   // while the flow still sends it, for the second time
    };

    struct Flow {
        explicit Flow(std::unique_ptr<ByteStream> stream) : stream(std::move(stream)) {}
        bool open() const { return stream != nullptr; }
        bool known() const;  // how long it takes

        std::unique_ptr<ByteStream> stream;
        int carries = 0;             // payloads
        double payload_ns = 0;       // that one takes, of late; 0: not known
        uint64_t free_at = 0;        // when what it carries next could begin, in ns
        Payload* sending = nullptr;  // with its header:
        size_t sent = 0;             // bytes

        Header header{};  // of what arrives
        size_t held = 0;  // bytes of it
        std::shared_ptr<Receive> arriving;
    };

    bool may_take(const Flow& flow) const;
    Payload* next(Flow& flow);
    void remove(Payload& payload);
    bool begin(Flow& flow);
    void finish(Flow& flow);
    void end(Flow& flow, const std::string& reason);

    std::deque<Flow> flows_;
    size_t open_ = 0;
    std::vector<std::string> ended_;

    std::map<uint64_t, Payload> payloads_;  // not acknowledged
    std::deque<Payload*> queue_;            // not begun
    uint64_t sent_ = 0;

    std::map<uint64_t, std::shared_ptr<Receive>> expected_;  // by number
    uint64_t announced_ = 0;
    std::vector<Arrived> arrived_;
};

}  // namespace ringcomm
