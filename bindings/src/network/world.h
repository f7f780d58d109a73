// One process's end of the network: the link, and the groups whose packets it carries.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/peer_group.h"
#include "link/link.h"
#include "network/packets.h"

namespace ringcomm {

// What arrives for a group, under the world's mutex.
class PacketHandler {
public:
    virtual void packet_arrived(const PacketHead& head, PacketReader& packet) = 0;
    virtual void connected(int process) = 0;
    virtual void left(int process) = 0;
    virtual void fail_for(const std::string& what_this_rank_cannot) = 0;

protected:
    ~PacketHandler() = default;
};

class NetworkWorld final : LinkEvents, public Sleeper {
public:
    explicit NetworkWorld(std::unique_ptr<Link> link);
    ~NetworkWorld();  // after flush()

    const std::unique_ptr<Link> link;
    std::mutex mutex;  // of the link, and of what packets change in the groups
    // Of all groups of this rank. If the first one shares memory with its host, these are those of that memory.
    std::shared_ptr<Drains> drains = std::make_shared<Drains>();

    // No rank uses a group before all ranks have it. Only for the first one, that of all processes, a packet may be
    // early; for another unknown group it is late.
    void add(uint64_t group, PacketHandler& handler);
    // `untold`: the processes that have not heard how this rank has left the group, as `packets` say.
    void remove(uint64_t group, std::vector<PacketWriter> packets, std::vector<int> untold);

    // With the mutex. The packet leaves even if no thread of this process waits for anything.
    void send_packet(int process, Bytes packet);
    void wake_peer(int process);  // of this host
    // What has become of a process that was not connected at the start: the link is, or it has left all groups.
    void connected(int process);
    void left(int process);
    // This process cannot go on: all groups fail.
    void fail(const std::string& what_this_rank_cannot);
    // As Link::drop(), also while no thread of this process waits: a peer whose call has failed needs its memory back.
    void drop(uint64_t tag);
    bool progress();
    // Before a call: takes what has come while this process was away for long, such as the failure of the group.
    void catch_up();
    // Once: waits up to two seconds until the peers have taken what was sent, five where that takes a connection.
    void flush();
    // Without the mutex. An event is also that another thread has moved something.
    uint32_t announce() override;
    void sleep(uint32_t ticket, uint64_t ns) override;
    void retract() override { sleepers_.fetch_sub(1); }
    void wake() override;
    // Why nothing arrives from a process any more; nullptr: it is there.
    const std::string* lost(int process) const { return lost_[process] ? &*lost_[process] : nullptr; }
    bool has_lost() const { return has_lost_; }
    bool has_failed = false;  // some group

private:
    struct LeftGroup {
        std::vector<PacketWriter> packets;
        std::vector<int> untold;  // processes
    };
    static constexpr size_t MOST_LEFT = 1000;  // of LeftGroup

    void packet_arrived(int process, Bytes packet) override;
    void peer_lost(int process, const std::string& reason) override;
    void packet_queued(int process) override { flush_later(process); }
    static void deliver(PacketHandler& handler, Bytes packet);
    void flush_later(int process);
    bool wake_flush_thread();  // false if the system refuses the thread
    void flush_unsent();       // on a thread of its own

    std::map<uint64_t, PacketHandler*> groups_;
    std::deque<LeftGroup> left_;  // the last ones
    bool joined_ = false;
    std::vector<std::vector<std::byte>> early_;
    std::vector<std::optional<std::string>> lost_;
    bool has_lost_ = false;
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> sleeps_long_{false};  // a thread that takes itself for the only one

    uint64_t last_progress_ = 0;  // ns

    std::vector<int> unsent_;  // the processes for which packets are queued
    std::condition_variable flush_needed_;
    bool stopping_ = false, flushed_ = false;
    std::thread flush_thread_;  // begins when it is needed
};

// In a forked child: see Link::after_fork().
void networks_after_fork();

}  // namespace ringcomm
