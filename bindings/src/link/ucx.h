// UCX as the library of a MessageLink: over RDMA where there is, over TCP else. libucp is opened at run time.
#pragma once

#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "link/message_library.h"
#include "link/ucx_api.h"

namespace ringcomm {

class UcxMessages final : public MessageLibrary {
public:
    // `library`: a path or a name for dlopen(). `devices`: those between hosts, as in UCX_NET_DEVICES; "": all.
    // `ports`: those at which it may listen over TCP, as in UCX_TCP_PORT_RANGE; "": any. The variables UCX_* of the
    // environment come first. A host that does not answer for about `keepalive` seconds is lost, except over TCP, where
    // UCX waits until TCP gives up.
    UcxMessages(const std::string& library, const std::string& devices, const std::string& ports, double keepalive);
    ~UcxMessages() override;  // waits up to 0.2 s until the peers have what was sent
    UcxMessages(const UcxMessages&) = delete;

    std::string path() const { return api_.path(); }
    std::string version() const { return api_.get_version_string(); }
    // The transports and devices that UCX may use, e.g. "rc_mlx5/mlx5_0:1 tcp/eth0".
    std::string transports() const { return transports_; }
    std::span<const std::byte> address() const;

    // Begins to connect; then await_peers() until it returns true: `connected` tells of each peer, and this process.
    void connect(int rank, const std::vector<const void*>& addresses);
    bool await_peers(uint64_t deadline, int* connected);
    int rank() const { return rank_; }
    int size() const { return int(peers_.size()); }

    int send(const std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) override;
    int receive(std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) override;
    int test(uint64_t& request, bool& done) override;
    void cancel(uint64_t request) override;
    void forget(uint64_t request) override;
    int probe(uint64_t tag, Probed& probed) override;
    int receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) override;
    std::string describe(int status) const override { return std::string("UCX: ") + api_.status_string(status); }
    bool any_thread() const override { return true; }
    bool progress() override;
    std::vector<LostPeer> lost_peers() override { return std::exchange(lost_, {}); }
    void sleep(uint64_t ns) override;
    void wake() override;

private:
    struct Peer {
        UcxMessages* owner;
        int rank;
        ucp::Endpoint* endpoint = nullptr;
        uint64_t hello_sent = 0, hello_received = 0;  // requests; 0: done
        std::byte hello{};
    };

    void open(const std::string& devices, const std::string& ports, double keepalive);
    void close();
    std::deque<std::vector<std::byte>> drain();
    void* close_endpoint(Peer& peer, uint32_t flags);
    bool finish(uint64_t& request, const Peer& peer);
    int started(void* result, uint64_t& request) const;
    void check(ucp::Status status, const char* function) const;

    const ucp::Api api_;
    ucp::Context* context_ = nullptr;
    ucp::Worker* worker_ = nullptr;
    void* address_ = nullptr;
    size_t address_bytes_ = 0;
    std::string transports_;
    int rank_ = 0;
    std::vector<Peer> peers_;
    std::vector<LostPeer> lost_;
    std::mutex mutex_;  // of the worker: sleep() uses it beside other calls
    int ready_ = -1;    // readable when something arrives for an armed worker
    int wake_up_ = -1;  // readable after wake()
};

}  // namespace ringcomm
