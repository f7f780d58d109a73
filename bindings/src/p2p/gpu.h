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

#include "cuda/liveness.h"
#include "cuda/messages.h"
#include "p2p/request.h"

namespace ringcomm {

class PointToPointEngine::Gpu {
public:
    Gpu(PointToPointEngine& engine, const Driver& driver, const rc_gpu_messages_setup& setup);

    void prepare(Request& request);  // before begin
    void send(Request& request);
    void keep_order() {
        if (!staging_.empty()) launch_staging();
    }  // before a send that is not launched
    void answer_rts(Endpoint& endpoint, Request& request, const PacketHeader& header);
    void continue_send(Endpoint& endpoint, Request& request, const PacketHeader& cts);
    bool try_write(Endpoint& endpoint, PacketHeader header);      // ARENA, STAGED, RELEASED
    void handle(Endpoint& endpoint, const PacketHeader& header);  // STAGED, RELEASED
    // A message in a slot is over. `fetched`: the receiver has launched its FETCH; else it never will.
    void free_slot(Request& request, bool fetched);
    void receive_own(Request& request, const PacketHeader& header);
    // gpu_copies.cpp
    void chunk_sent(Request& request);                                   // to a receiver in host memory
    void put(Request& request, const std::byte* payload, size_t bytes);  // what comes next of a message, from the host
    void receive(Request& request, const std::byte* payload);            // a whole message from the host
    // All has been launched, or failed: `async` is finished once that has ended.
    void finish(std::shared_ptr<AsyncRequest> async);

    bool progress();                            // what can be launched, and what has ended
    bool busy() const { return busy_.load(); }  // something is in flight
    std::optional<Failure> find_failure();
    void fail(const Failure& failure);
    void drain();  // until nothing is in flight
    std::vector<std::shared_ptr<AsyncRequest>> in_flight() const;
    void coalesce(bool begins);

    GpuMessages gpus;

private:
    struct Staged {  // a message in a slot, whose send is done
        std::shared_ptr<BufferedSend> sent;
        cuda::MessageTransfer transfer;
        uint64_t launch;
    };
    struct Fetch {
        Request* request;
        Endpoint* endpoint;
        GpuLocation at;
        uint64_t bytes;
        bool whole;
    };
    struct Outgoing {  // a message to host memory
        Request* request;
        Endpoint* endpoint;  // of the receiver; null: this rank itself
        const std::byte* source;
        uint64_t launch;     // after which it is copied: its STAGE
        GpuEvent begin;      // the same, of any work
        GpuBuffer memory{};  // where the source is, if nobody else keeps it
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
    bool copy_to_host(Outgoing& outgoing, bool& moved);
    bool receive_from_host(Incoming& incoming);
    GpuEvent begin_of(GpuRequest& gpu);
    bool end_running();
    void free_kept();
    void check_kernels();
    CUstream stream_of(Request& request);  // which then waits for what must be before
    bool over(const Request& request) const;
    // A copy uses the buffer until `event`.
    void keep(GpuBuffer buffer, GpuEvent event) { kept_.push_back({std::move(buffer), std::move(event)}); }

    PointToPointEngine& engine_;
    PeerGroup& group_;
    std::deque<Request*> staging_;    // to be staged in one slot each, and announced
    std::vector<Request*> chunking_;  // whose receivers wait for chunks
    std::vector<Fetch> fetching_;
    std::vector<Outgoing> outgoing_;
    std::vector<Incoming> incoming_;  // until they can be copied
    std::map<const Request*, Staged> staged_;
    std::vector<Launched> launched_[cuda::MAX_LAUNCHES];  // by launch
    std::list<Running> running_;
    std::map<uint64_t, std::pair<GpuBuffer, GpuEvent>> own_;  // messages to this rank itself, by number
    uint64_t own_count_ = 0;
    std::vector<std::pair<GpuBuffer, GpuEvent>> kept_;
    std::atomic<bool> busy_{false};
    bool coalescing_ = false;
};

}  // namespace ringcomm
