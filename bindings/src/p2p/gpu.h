// Messages of arrays on GPUs. They are matched as all others; only their data moves by launches
// (kernels/cuda/messages.cuh).
//
//   sender                                          receiver
//   ARENA, once: how to access its memory      →
//   STAGE launched; RTS with its slot          →    matches a receive, then one of two:
//                                              ←    FETCH launched; FIN with the slot: it may be used again
//                                              ←    CTS: the receive is of host memory, or cannot access the slot: the
//                                                   data comes in DATA packets (gpu_copies.cpp)
//
// Where the message is larger than a slot, or none is free, the RTS names no slot:
//
//   RTS                                        →    matches a receive
//                                              ←    CTS
//   STAGE of a chunk launched; STAGED          →
//                                              ←    FETCH launched; RELEASED
//
// A request is done once its last launch was made, and its Work has ended once that has run.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <span>

#include "cuda/liveness.h"
#include "cuda/messages.h"
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

class GpuTransfers {
public:
    explicit GpuTransfers(PointToPointEngine& engine);
    ~GpuTransfers();

    // --- Calls of the program (gpu_calls.cpp).

    void connect(const rc_gpu_messages_setup& setup);  // once, before the first message
    // Until a call of it with false, or a wait, what can be launched together is not launched.
    void coalesce(bool begins);
    void wait();      // until what is in flight has ended
    bool all_read();  // by the peers: the memory of the setup can be freed once this is closed

    // --- What the engine hands over, under its lock.

    bool connected() const { return gpus_ != nullptr; }
    std::shared_ptr<AsyncRequest> make_request(const rc_transfer& transfer);
    void check_connected() const;
    void prepare(Request& request);  // before send(), or the match of a receive
    void send(Request& request);
    void keep_order() {  // before a send that is not launched
        if (!staging_.empty()) launch_staging();
    }
    // A receive has matched a message: announced by a peer, whole from host memory, or from a GPU of this rank itself.
    void answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header);
    void receive(Request& request, const std::byte* payload);
    void receive_own(Request& request, const PacketHeader& header);
    void send_data(Endpoint& endpoint, Request& request, const PacketHeader& cts);
    void put(Request& request, const std::byte* payload, size_t bytes);  // what comes next of a message, from the host
    void handle(Endpoint& endpoint, const PacketHeader& header, const std::byte* payload);  // ARENA, STAGED, RELEASED
    // A message in a slot is over. `fetched`: the receiver has launched its FETCH; else it never will.
    void free_slot(Request& request, bool fetched);
    // All has been launched, or failed: `async` is finished once that has ended.
    void finish(std::shared_ptr<AsyncRequest> async);

    bool progress();                            // what can be launched, and what has ended
    bool busy() const { return busy_.load(); }  // something is in flight
    std::optional<Failure> find_failure();
    void fail(const Failure& failure);
    void drain();  // until nothing is in flight

private:
    class StartedTransfer;  // a Work
    class EndChecks;

    struct Peer {
        bool arena_sent = false;
        std::vector<std::byte> arena{};  // the handle of its arena, once it has come
    };
    struct Staged {  // a message in a slot, whose send is done
        explicit Staged(const Request& sent) : transfer(sent.transfer), request(sent, transfer, nullptr) {
            request.gpu = &gpu;
        }

        const rc_transfer transfer;
        GpuRequest gpu;
        Request request;
        cuda::MessageTransfer stage{};
        uint64_t launch = 0;
    };
    struct Fetch {
        Request* request;
        Endpoint* endpoint;
        GpuLocation at;
        uint64_t bytes;
        bool whole;
    };
    struct Chunk {
        GpuBuffer memory;
        GpuEvent copied;
        size_t bytes;
    };
    struct Outgoing {  // a message to host memory
        Request* request;
        Endpoint* endpoint;  // of the receiver; null: this rank itself
        const std::byte* source;
        uint64_t launch;             // after which it is copied: its STAGE
        GpuEvent begin;              // the same, of any work
        GpuBuffer memory{};          // where the source is, if nobody else keeps it
        std::deque<Chunk> chunks{};  // that are being copied, or there
        size_t queued = 0;           // bytes that are copied, or have been
        bool sending = false;        // the first chunk
    };
    struct Incoming {  // a message from host memory
        Request* request;
        GpuEvent begin;      // after which it is copied
        Endpoint* endpoint;  // of the sender, who waits for a CTS; null: its payload is here
        std::vector<std::byte> payload{};
    };
    struct Launched {  // a part of a launch, as errors describe it
        rc_transfer transfer;
        uint64_t number;
        int peer;
    };
    struct Running {
        std::shared_ptr<AsyncRequest> async;
        std::unique_ptr<Failure> failure;
        PeerLoss loss{};
    };

    uint64_t launch(const std::vector<cuda::MessageTransfer>& transfers, const std::vector<Request*>& requests,
                    CUstream stream);
    void leave_stream(GpuRequest& gpu);
    void announce(Request& request);
    void drop_unreceived();
    void launch_staging();
    void launch_chunks();
    void launch_fetches();
    bool continue_copies();
    bool copy_to_host(Outgoing& outgoing);
    void drop_outgoing(const Request& request);
    void keep_chunks(Outgoing& outgoing);
    bool receive_from_host(Incoming& incoming);
    GpuEvent begin_of(GpuRequest& gpu);
    bool end_running();
    void free_kept();
    void check_kernels();
    void wait_end(AsyncRequest& async, uint64_t deadline);  // of its launches
    void order(const Request& request, void* stream);
    CUstream stream_of(Request& request);  // which then waits for what must be before
    bool over(const Request& request) const;
    // A copy uses the buffer until `event`.
    void keep(GpuBuffer buffer, GpuEvent event) { kept_.push_back({std::move(buffer), std::move(event)}); }

    PointToPointEngine& engine_;
    PeerGroup& group_;
    std::unique_ptr<GpuMessages> gpus_;  // nullptr: none is connected
    std::map<int, Peer> peers_;
    std::deque<Request*> staging_;    // to be staged in one slot each, and announced
    std::vector<Request*> chunking_;  // whose receivers wait for chunks
    std::vector<Fetch> fetching_;
    std::list<Outgoing> outgoing_;
    std::vector<Incoming> incoming_;  // until they can be copied
    std::map<const Request*, std::shared_ptr<Staged>> staged_;
    std::vector<Launched> launched_[cuda::MAX_LAUNCHES];  // by launch
    std::list<Running> running_;
    std::map<uint64_t, std::pair<GpuBuffer, GpuEvent>> own_;  // messages to this rank itself, by number
    uint64_t own_count_ = 0;
    std::vector<std::pair<GpuBuffer, GpuEvent>> kept_;
    std::atomic<bool> busy_{false};
    bool coalescing_ = false;
};

}  // namespace ringcomm
