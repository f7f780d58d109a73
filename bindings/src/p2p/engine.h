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
//
// Messages of arrays on GPUs are matched as all others; GpuTransfers (gpu.h) moves their data. engine.cpp and
// transfer.cpp hand them over; packets.cpp, large_message.cpp, waiting.cpp and probe.cpp know only host memory.
#pragma once

#include <map>
#include <optional>
#include <span>

#include "core/progress_thread.h"
#include "core/stores.h"
#include "p2p/endpoint.h"
#include "p2p/matching.h"

#include "ringcomm.h"

namespace ringcomm {

constexpr size_t MAX_BUFFERED_MESSAGE = 4096;
constexpr size_t MAX_BUFFERED = 16 << 20;  // per peer, with some 250 bytes for each message; beyond, a send blocks

class GpuTransfers;

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

    GpuTransfers& gpu() { return *gpu_; }

private:
    friend AsyncRequest;
    friend GpuTransfers;
    class Waiter;

    void post(std::span<Request* const> requests);
    void post(Request& request);
    bool is_eager(const Request& request);
    bool needs_thread(const Request& request);
    bool is_urgent(const Request& request);
    void post_receive(Request& request);
    void forget_posted(const Request& request);
    bool withdraw(Request& request);
    enum class Peers { EXPECTED, ALL };            // to look at
    bool progress(Peers peers = Peers::EXPECTED);  // true if anything moved
    uint64_t next_look(uint64_t deadline) const;
    // transfer.cpp
    void begin(Request& request);
    void match(int source, const PacketHeader& header, const std::byte* payload, Request* sender = nullptr);
    void deliver(Request& request, int source, const PacketHeader& header, const std::byte* payload, Request* sender);
    void handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload);
    void send_data(Endpoint& endpoint, Request& request, const PacketHeader& cts);
    void receive_data(Request& request, const std::byte* payload, size_t bytes);
    void complete(Request& request);
    // packets.cpp
    void watch(Endpoint& endpoint);
    bool visit_peers(Peers peers);
    bool visit_watched();
    bool visit(Endpoint& endpoint);
    void send_packet(Endpoint& endpoint, PendingPacket packet);
    static size_t cost(const Request& request);  // in bytes of host memory, once buffered
    bool try_buffer(Endpoint& endpoint, PendingPacket& packet);
    void note_buffered(Endpoint& endpoint, const Request& request);
    void forget_buffered(Endpoint& endpoint, const Request& request);
    void drop_buffered(Endpoint& endpoint);
    bool try_write(Endpoint& endpoint, const PendingPacket& packet);
    bool flush_queue(Endpoint& endpoint);
    bool receive_packets(Endpoint& endpoint);
    // probe.cpp
    void take(Request& request, UnexpectedMessage message);
    void check_taken(const Request& request) const;
    bool cancel(Request& request);
    // large_message.cpp
    const std::byte* prepare_rendezvous(Endpoint& endpoint, const Request& request, PacketHeader& header) const;
    void rendezvous_written(Endpoint& endpoint, const PendingPacket& packet, size_t bytes);
    void answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header);
    void handle_rendezvous(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload);
    bool read_next(Endpoint& endpoint);

    void fail(Request& request, const Failure& failure);
    void fail_all(const Failure& failure, const Request* spared = nullptr);
    Failure break_group(const std::exception& error);
    void wait(Request& request, uint64_t deadline = UINT64_MAX);
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
    const std::unique_ptr<GpuTransfers> gpu_;
    std::vector<Endpoint> endpoints_;  // one per peer
    std::vector<Endpoint*> watched_;   // at which each step looks
    size_t turn_ = 0;                  // the other one at which the last step has looked
    PostedReceives posted_;            // unmatched receives and probes
    int posted_for_any_ = 0;           // of them, from any source
    UnexpectedMessages unexpected_;
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
