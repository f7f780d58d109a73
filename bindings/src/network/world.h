// One process's end of the network: the link, and the groups whose packets it carries.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/peer_group.h"
#include "network/link.h"
#include "network/packets.h"

namespace ringcomm {

// What arrives for a group, under the world's mutex.
class PacketHandler {
public:
    virtual void packet_arrived(const PacketHead& head, PacketReader& packet) = 0;

protected:
    ~PacketHandler() = default;
};

class NetworkWorld final : LinkEvents {
public:
    explicit NetworkWorld(std::unique_ptr<Link> link);
    ~NetworkWorld();  // waits up to two seconds until the peers have taken what was sent

    const std::unique_ptr<Link> link;
    std::mutex mutex;  // of the link, and of what packets change in the groups
    const std::shared_ptr<Drains> drains = std::make_shared<Drains>();  // of the groups without ranks of one host

    // The numbers of the groups that a process joins grow, so a packet for an unknown group is early if its number is
    // greater than all of them, and late otherwise.
    void add(uint64_t group, PacketHandler& handler);
    void remove(uint64_t group);

    bool progress();
    // Without the mutex: returns once something may have arrived, been moved by another thread, or after `ns`.
    void sleep(uint64_t ns);
    void wake();
    // Why nothing arrives from a process any more; nullptr: it is there.
    const std::string* lost(int process) const { return lost_[process] ? &*lost_[process] : nullptr; }

private:
    void packet_arrived(int process, Bytes packet) override;
    void peer_lost(int process, const std::string& reason) override;
    static void deliver(PacketHandler& handler, Bytes packet);

    std::map<uint64_t, PacketHandler*> groups_;
    std::map<uint64_t, std::vector<std::vector<std::byte>>> early_;
    uint64_t last_joined_ = 0;
    std::vector<std::optional<std::string>> lost_;
    std::atomic<int> sleepers_{0};
};

// In a forked child.
void abandon_networks();

// For the threads that wait for messages.
class WorldSleeper final : public Sleeper {
public:
    explicit WorldSleeper(NetworkWorld& world) : world_(world) {}
    uint32_t announce() override { return 0; }
    void sleep(uint32_t, uint64_t ns) override { world_.sleep(ns); }
    void retract() override {}
    void wake() override { world_.wake(); }

private:
    NetworkWorld& world_;
};

}  // namespace ringcomm
