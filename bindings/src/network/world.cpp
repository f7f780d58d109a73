// NetworkWorld: routes packets to groups.
#include "network/world.h"

#include <algorithm>
#include <utility>

#include "core/waiting.h"
#include "core/work.h"

namespace ringcomm {

namespace {

struct OpenNetworks {
    std::mutex mutex;
    std::vector<NetworkWorld*> all;
};
OpenNetworks* open_networks = new OpenNetworks;  // a forked child gets new ones

}  // namespace

void networks_after_fork() {
    OpenNetworks* const parents = std::exchange(open_networks, new OpenNetworks);
    // A thread of the parent may have held the lock; then the child keeps the connections.
    const std::unique_lock lock(parents->mutex, std::try_to_lock);
    if (!lock) return;
    for (NetworkWorld* network : parents->all) network->link->after_fork();
}

NetworkWorld::NetworkWorld(std::unique_ptr<Link> given) : link(std::move(given)), lost_(link->size) {
    const std::lock_guard lock(open_networks->mutex);
    open_networks->all.push_back(this);
}

NetworkWorld::~NetworkWorld() {
    {
        const std::lock_guard lock(open_networks->mutex);
        std::erase(open_networks->all, this);
    }
    {
        const std::lock_guard lock(mutex);
        stopping_ = true;
        flush_needed_.notify_one();
    }
    if (flush_thread_.joinable()) flush_thread_.join();
    flush();
}

void NetworkWorld::flush() {
    // A peer may be outside ringcomm, and read nothing, or take long to connect.
    constexpr uint64_t FLUSH_NS = 2'000'000'000, CONNECT_NS = 5'000'000'000;
    const uint64_t begin = now_ns();
    std::unique_lock lock(mutex);
    if (std::exchange(flushed_, true)) return;
    const auto most = [&] { return link->connecting() && !has_failed ? CONNECT_NS : FLUSH_NS; };
    while (!link->flushed() && now_ns() - begin < most()) {
        if (progress()) continue;
        lock.unlock();
        link->sleep(1'000'000);
        lock.lock();
    }
}

void NetworkWorld::add(uint64_t group, PacketHandler& handler) {
    const std::lock_guard lock(mutex);
    groups_[group] = &handler;
    joined_ = true;
    for (const std::vector<std::byte>& packet : std::exchange(early_, {})) deliver(handler, packet);
}

void NetworkWorld::remove(uint64_t group, std::vector<PacketWriter> packets, std::vector<int> untold) {
    const std::lock_guard lock(mutex);
    groups_.erase(group);
    if (untold.empty()) return;
    left_.push_back({std::move(packets), std::move(untold)});
    if (left_.size() > MOST_LEFT) left_.pop_front();
}

void NetworkWorld::send_packet(int process, Bytes packet) {
    link->send_packet(process, packet);
    flush_later(process);
}

void NetworkWorld::wake_peer(int process) {
    link->wake_peer(process);
    flush_later(process);
}

void NetworkWorld::connected(int process) {
    for (const auto& [group, handler] : groups_) handler->connected(process);
    for (LeftGroup& group : left_) {
        if (!std::erase(group.untold, process)) continue;
        for (const PacketWriter& packet : group.packets) link->send_packet(process, packet.packet());
    }
    std::erase_if(left_, [](const LeftGroup& group) { return group.untold.empty(); });
    flush_later(process);
    wake();
}

void NetworkWorld::left(int process) {
    for (const auto& [group, handler] : groups_) handler->left(process);
    wake();
}

void NetworkWorld::fail(const std::string& what_this_rank_cannot) {
    for (const auto& [group, handler] : groups_) handler->fail_for(what_this_rank_cannot);
}

void NetworkWorld::flush_later(int process) {
    if (!link->has_queued(process) || std::count(unsent_.begin(), unsent_.end(), process)) return;
    if (wake_flush_thread()) unsent_.push_back(process);  // else the next wait of this process sends it
}

void NetworkWorld::drop(uint64_t tag) {
    link->drop(tag);
    if (link->dropping()) wake_flush_thread();
}

bool NetworkWorld::wake_flush_thread() {
    try {
        if (!flush_thread_.joinable()) flush_thread_ = named_thread("ringcomm-net", [this] { flush_unsent(); });
    } catch (const std::exception&) {
        return false;
    }
    flush_needed_.notify_one();
    return true;
}

// As a rule a thread that waits is faster.
void NetworkWorld::flush_unsent() {
    constexpr auto DELAY = std::chrono::milliseconds(5);
    constexpr int MOST = 64;  // calls of progress() in one turn, for which others have to wait
    std::unique_lock lock(mutex);
    while (!stopping_) {
        std::erase_if(unsent_, [&](int process) { return !link->has_queued(process); });
        if (unsent_.empty() && !link->dropping()) {
            flush_needed_.wait(lock);
        } else if (flush_needed_.wait_for(lock, DELAY) == std::cv_status::timeout) {
            try {
                for (int i = 0; i < MOST && progress(); ++i) continue;
            } catch (const std::exception&) {  // no memory: a thread that waits will say so
            }
        }
    }
}

void NetworkWorld::catch_up() {
    constexpr uint64_t LONG = 5 * TICK_NS;
    constexpr int MOST = 64;
    const std::lock_guard lock(mutex);
    if (tick_ns() - last_progress_ < LONG) return;
    for (int i = 0; i < MOST && progress(); ++i) continue;
}

bool NetworkWorld::progress() {
    last_progress_ = tick_ns();
    if (!link->progress(*this)) return false;
    wake();
    return true;
}

// The link remembers the wake-up for a thread that is about to sleep.
void NetworkWorld::wake() {
    if (sleepers_.load() > 0) link->wake();
}

uint32_t NetworkWorld::announce() {
    const uint32_t others = sleepers_.fetch_add(1);
    if (others && sleeps_long_.exchange(false)) link->wake();
    return others;
}

// A wake-up ends the sleep of one thread, perhaps of another one than it was for, so several look again and again.
void NetworkWorld::sleep(uint32_t, uint64_t ns) {
    constexpr uint64_t WITH_OTHERS = 1'000'000;
    about_to_wait();
    if (ns > WITH_OTHERS) {
        sleeps_long_ = true;
        if (sleepers_.load() > 1) {
            sleeps_long_ = false;
            ns = WITH_OTHERS;
        }
    }
    link->sleep(ns);
    sleeps_long_ = false;
}

void NetworkWorld::packet_arrived(int, Bytes packet) {
    const auto head = PacketReader(packet).next<PacketHead>();
    const auto found = groups_.find(head.group);
    if (found != groups_.end()) return deliver(*found->second, packet);
    if (!joined_) early_.emplace_back(packet.begin(), packet.end());
}

void NetworkWorld::deliver(PacketHandler& handler, Bytes packet) {
    PacketReader reader(packet);
    const auto head = reader.next<PacketHead>();
    if (reader.complete()) handler.packet_arrived(head, reader);
}

}  // namespace ringcomm
