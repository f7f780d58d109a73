// NetworkWorld: routes packets to groups.
#include "network/world.h"

#include <algorithm>
#include <utility>

#include "core/waiting.h"

namespace ringcomm {

namespace {

std::mutex open_mutex;
std::vector<NetworkWorld*> open_networks;

}  // namespace

// A thread of the parent may have held the lock; then the child keeps the connections.
void abandon_networks() {
    const std::unique_lock lock(open_mutex, std::try_to_lock);
    if (!lock) return;
    for (NetworkWorld* network : open_networks) network->link->abandon();
}

NetworkWorld::NetworkWorld(std::unique_ptr<Link> given) : link(std::move(given)), lost_(link->size) {
    const std::lock_guard lock(open_mutex);
    open_networks.push_back(this);
}

NetworkWorld::~NetworkWorld() {
    {
        const std::lock_guard lock(open_mutex);
        std::erase(open_networks, this);
    }
    constexpr uint64_t PATIENCE = 2'000'000'000;  // a peer may be outside ringcomm, and read nothing
    const uint64_t deadline = now_ns() + PATIENCE;
    while (!link->flushed() && now_ns() < deadline) {
        if (!progress()) link->sleep(1'000'000);
    }
}

void NetworkWorld::add(uint64_t group, PacketHandler& handler) {
    const std::lock_guard lock(mutex);
    groups_[group] = &handler;
    last_joined_ = std::max(last_joined_, group);
    const auto early = std::exchange(early_[group], {});
    early_.erase(group);
    for (const std::vector<std::byte>& packet : early) deliver(handler, packet);
}

void NetworkWorld::remove(uint64_t group) {
    const std::lock_guard lock(mutex);
    groups_.erase(group);
}

bool NetworkWorld::progress() {
    if (!link->progress(*this)) return false;
    wake();
    return true;
}

// A thread that is about to sleep may have missed what this one has moved; the link remembers the wake-up.
void NetworkWorld::wake() {
    if (sleepers_.load() > 0) link->wake();
}

void NetworkWorld::sleep(uint64_t ns) {
    constexpr uint64_t WITH_OTHERS = 1'000'000;  // one wake-up may end another thread's sleep
    const bool alone = sleepers_.fetch_add(1) == 0;
    link->sleep(alone ? ns : std::min(ns, WITH_OTHERS));
    sleepers_.fetch_sub(1);
}

void NetworkWorld::packet_arrived(int, Bytes packet) {
    const auto head = PacketReader(packet).next<PacketHead>();
    const auto found = groups_.find(head.group);
    if (found != groups_.end()) return deliver(*found->second, packet);
    if (head.group > last_joined_) early_[head.group].emplace_back(packet.begin(), packet.end());
}

void NetworkWorld::deliver(PacketHandler& handler, Bytes packet) {
    PacketReader reader(packet);
    const auto head = reader.next<PacketHead>();
    if (reader.complete()) handler.packet_arrived(head, reader);
}

void NetworkWorld::peer_lost(int process, const std::string& reason) {
    if (!lost_[process]) lost_[process] = reason;
}

}  // namespace ringcomm
