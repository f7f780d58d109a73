// Point-to-point messages: matched by source and tag, in order per peer and tag, any number pending.
//
// A probe is a receive that gets no payload: it waits in the same list, and sees what a receive in its place would get.
//
// A small send whose receiver makes no room is buffered: it returns before its message is in the ring.
//
// Ranks exchange packets (channel.h). A small message is one EAGER packet; large_message.cpp moves a larger one.
//
// Every waiting thread makes progress on all transfers of its rank, under one lock. To start an asynchronous request
// only posts it: what it moved would delay the next one. While such requests are open for which a peer may wait, and no
// thread makes calls, a progress thread does.
//
// A step looks at the rings of the peers with which something is pending, and at one other.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <span>

#include "core/progress_thread.h"
#include "core/stores.h"
#include "p2p/channel.h"

#include "ringcomm.h"

namespace ringcomm {

constexpr size_t MAX_BUFFERED_MESSAGE = 4096;
constexpr size_t MAX_BUFFERED = 16 << 20;  // per peer, with some 250 bytes for each message; beyond, a send blocks

constexpr bool sends(int kind) { return kind <= RC_SEND_SYNCHRONOUS; }

class PointToPointEngine {
public:
    explicit PointToPointEngine(PeerGroup& group);
    ~PointToPointEngine();

    rc_message run(const rc_transfer& transfer);  // returns what a receive or probe has found
    rc_message exchange(const rc_transfer& outgoing, const rc_transfer& incoming);
    std::shared_ptr<Work> start(const rc_transfer& transfer);
    // A transfer that is done until it is started, as often as wanted: together with others, or none of them.
    std::shared_ptr<Work> prepare(const rc_transfer& transfer);
    void start_prepared(std::span<Work* const> works);
    std::optional<rc_message> poll(const rc_transfer& probe);  // nothing, if there is no such message now
    // This rank is about to close, and starts no more sends: whoever waits for one shall fail as if it had closed.
    void announce_close();
    // Another engine has channels to the same ranks: this one exchanges no messages.
    void give_up_channels();
    // Before group.start_closing(): waits until the peers have room for all buffered sends. Returns what prevented it.
    std::optional<Failure> flush();
    void stop();  // after group.start_closing()

    // --- Messages on GPUs.

    void connect_gpu(const rc_gpu_messages_setup& setup);  // once, before the first one
    // Until a call of it with false, or a wait, what can be launched together is not launched.
    void coalesce(bool begins);
    void wait_gpu();  // until what is in flight has ended
    bool all_read();  // by the peers: the memory of the setup can be freed once this is closed

private:
    struct Request;      // an open send, receive or probe, owned by its caller
    class AsyncRequest;  // an asynchronous one, which owns itself
    struct BufferedSend;
    class Waiter;
    class EndChecks;
    class Gpu;

    struct UnexpectedMessage {
        int source;
        PacketHeader header;
        std::vector<std::byte> payload;
        Request* sender;  // of a synchronous send to this rank itself, which is done once this is received
    };
    struct PendingPacket {
        PacketKind kind;
        Request* request;
        uint64_t number;                        // of the RTS that it answers
        std::shared_ptr<BufferedSend> owned{};  // `request` is its own
        uint64_t location = 0, bytes = 0;       // of the header, unless it is known only later
    };
    struct Endpoint {
        int peer;
        std::unique_ptr<PacketChannel> channel;  // nullptr: the group has none to this peer
        std::deque<PendingPacket> queue{};       // waiting for room in the channel
        int buffered = 0;                        // packets in the queue that are buffered sends
        size_t buffered_bytes = 0;
        std::vector<Request*> rts_sent{};      // sends that are not known to have arrived
        std::vector<Request*> rts_received{};  // receives matched by an RTS
        uint64_t rts_count = 0;
        int posted = 0;        // receives and probes of its messages
        bool watched = false;  // it is in watched_
        bool closes = false;   // the peer has announced that it does
        bool arena_sent = false;
        std::vector<std::byte> arena{};  // the handle of the peer's arena, once it has come

        bool has_pending() const { return posted || !queue.empty() || !rts_sent.empty() || !rts_received.empty(); }
    };

    void post(std::span<Request* const> requests);
    void post(Request& request);
    void begin(Request& request);
    bool is_eager(const Request& request);
    bool needs_thread(const Request& request);
    bool is_urgent(const Request& request);
    std::list<UnexpectedMessage>::iterator find_unexpected(const Request& request);
    void post_receive(Request& request);
    void forget_posted(const Request& request);
    bool withdraw(Request& request);
    void match(int source, const PacketHeader& header, const std::byte* payload, Request* sender = nullptr);
    void deliver(Request& request, int source, const PacketHeader& header, const std::byte* payload, Request* sender);
    // packets.cpp
    enum class Peers { EXPECTED, ALL };            // to look at
    bool progress(Peers peers = Peers::EXPECTED);  // true if anything moved
    void watch(Endpoint& endpoint);
    bool visit_watched();
    bool visit(Endpoint& endpoint);
    void send_packet(Endpoint& endpoint, PendingPacket packet);
    static size_t cost(const Request& request);  // in bytes of host memory, once buffered
    bool try_buffer(Endpoint& endpoint, PendingPacket& packet);
    void note_buffered(Endpoint& endpoint, const Request& request);
    void forget_buffered(Endpoint& endpoint, const Request& request);
    void drop_buffered(Endpoint& endpoint);
    bool try_write(Endpoint& endpoint, PendingPacket packet);
    bool flush_queue(Endpoint& endpoint);
    bool receive_packets(Endpoint& endpoint);
    void handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload);
    // probe.cpp
    void take(Request& request, UnexpectedMessage message);
    void check_taken(const Request& request) const;
    bool cancel(Request& request);
    // large_message.cpp
    const std::byte* prepare_rendezvous(Endpoint& endpoint, const Request& request, PacketHeader& header) const;
    void rendezvous_written(Endpoint& endpoint, PendingPacket packet, size_t bytes);
    void answer_rts(Request& request, const PacketHeader& header);
    void handle_rendezvous(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload);
    bool read_next(Endpoint& endpoint);

    void complete(Request& request);
    void fail(Request& request, const Failure& failure);
    void fail_all(const Failure& failure, const Request* spared = nullptr);
    Failure break_group(const std::exception& error);
    void wait(Request& request, uint64_t deadline = UINT64_MAX);
    void wait_end(AsyncRequest& async, uint64_t deadline);  // of its launches
    void order(const Request& request, void* stream);
    uint64_t next_look(uint64_t deadline) const;
    void look(Request& request);
    void drain();
    void advance();
    void detach();
    void start_progress_thread();
    bool try_start_progress_thread();
    void progress_loop();
    template <class Function>
    void for_each_open(Function function);
    bool sends_no_more(int peer) const;
    std::optional<Failure> find_failure(const Request* waited_for = nullptr);
    std::optional<Failure> find_failure(const Request& request, uint64_t now) const;
    static Failure all_closed(const Request& request);
    std::optional<Failure> find_senders_closed(const Request& request) const;
    Failure as_failure_of(const Request& request, const Failure& failure);
    double timeout(const Request& request) const;
    Endpoint& endpoint_of(int peer) { return endpoints_[peer < group_.rank ? peer : peer - 1]; }
    const Endpoint& endpoint_of(int peer) const { return endpoints_[peer < group_.rank ? peer : peer - 1]; }

    PeerGroup& group_;
    Sleeper& sleeper_;
    std::mutex mutex_;
    std::unique_ptr<Gpu> gpu_;                     // nullptr: none is connected
    std::vector<Endpoint> endpoints_;              // one per peer
    std::vector<Endpoint*> watched_;               // at which each step looks
    size_t turn_ = 0;                              // the other one at which the last step has looked
    std::vector<Request*> posted_receives_;        // unmatched receives and probes, in order
    int posted_for_any_ = 0;                       // of them, from any source
    std::list<UnexpectedMessage> unexpected_;      // unmatched, in order
    std::map<uint64_t, UnexpectedMessage> taken_;  // by number
    OutputStores output_stores_;
    uint64_t taken_count_ = 0;
    size_t least_eager_bytes_ = SIZE_MAX;  // of all channels
    std::atomic<int> urgent_open_{0};      // of the asynchronous requests
    std::atomic<uint64_t> next_check_{0};  // by look(), ns
    bool completed_ = false;               // a request that another thread may wait for

    int async_open_ = 0;  // asynchronous requests and buffered sends
    int buffered_open_ = 0;
    std::atomic<int> waiters_{0};  // user threads in wait(); the progress thread stays idle meanwhile
    bool stopping_ = false;
    ProgressThread progress_thread_;
};

}  // namespace ringcomm
