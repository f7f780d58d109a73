// NetworkGroup: its calls, packets, and leaving.
#include "network/group.h"

#include <algorithm>
#include <utility>

#include "network/call.h"

namespace ringcomm {

int HostLayout::host_of(int rank) const {
    const auto has = [&](const std::vector<int>& host) { return std::count(host.begin(), host.end(), rank) > 0; };
    return int(std::find_if(ranks.begin(), ranks.end(), has) - ranks.begin());
}

size_t HostLayout::largest() const {
    size_t most = 0;
    for (const std::vector<int>& host : ranks) most = std::max(most, host.size());
    return most;
}

NetworkGroup::NetworkGroup(std::shared_ptr<NetworkWorld> given, NetworkGroupSpec spec, const rc_tuning& tuning)
    : PeerGroup(spec.rank, int(spec.members.size()), tuning, *spec.local.flight, given->drains),
      world(std::move(given)),
      layout(std::move(spec.layout)),
      local(std::move(spec.local)),
      number_(spec.number),
      members_(std::move(spec.members)),
      ancestors_(std::move(spec.ancestors)),
      failure_(std::make_shared<FailureState>(size, layout.ranks[layout.host], this)),
      left_after_(new std::atomic<uint64_t>[size]),
      messages_(size),
      statuses_(size) {
    for (int r = 0; r < size; ++r) {
        left_after_[r].store(OPEN);
        here_.push_back(layout.local_rank_of(r));
    }
    for (auto& slot : records_) slot.resize(layout.hosts());
    if (local.group) host_sleeper_.emplace(*local.group, *world);
    // A rank that waits in its host's memory must hear of failures elsewhere.
    drains->add(static_cast<PacketHandler*>(this), [this] { progress(); });
    world->add(number_, *this);
}

NetworkGroup::~NetworkGroup() {
    drains->remove(static_cast<PacketHandler*>(this));
    std::vector<int> untold;
    {
        const std::lock_guard lock(world->mutex);
        failure_->group = nullptr;
        for (int r = 0; r < size; ++r) {
            if (here_[r] < 0 && may_answer(r) && !world->link->connected(members_[r])) untold.push_back(members_[r]);
        }
    }
    world->remove(number_, last_packets(), std::move(untold));
    if (world->link->stuck()) new std::vector<std::byte>(std::move(scratch_));  // for ever: see Link::stuck()
}

std::byte* NetworkGroup::scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_ = std::vector<std::byte>(bytes);
    return scratch_.data();
}

void NetworkGroup::progress() {
    {
        const std::lock_guard lock(world->mutex);
        world->progress();
    }
    hear_host();
}

void NetworkGroup::prepare(const CallRecord& call) { NetworkCall(*this, call).prepare(); }

void NetworkGroup::run_collective(const CallRecord& call) {
    world->catch_up();  // or a late call could succeed with what others sent before they gave up
    check_failure();
    try {
        NetworkCall(*this, call).run();
    } catch (const Failure& thrown) {
        Failure failure = as_mismatch(thrown, call);
        if (failure.error.code == RC_MISMATCH) {
            name_call(failure, call);
            const std::lock_guard lock(world->mutex);
            mismatch_ = failure;
        }
        if (failure.error.code == RC_MISMATCH || failure.error.code == RC_ARGUMENT) finish(call.epoch);
        throw failure;
    }
    finish(call.epoch);
}

std::unique_ptr<PacketChannel> NetworkGroup::open_channel(int peer) {
    const int here = shares_memory(peer);
    if (here >= 0) return std::make_unique<HostChannel>(*local.group, here, *world, members_[peer]);
    return std::make_unique<NetworkChannel>(*world, members_[peer], head(PacketType::MESSAGE), message_tag(),
                                            messages_[peer]);
}

// --- Packets ---------------------------------------------------------------------------------------------------------

void NetworkGroup::packet_arrived(const PacketHead& head, PacketReader& packet) {
    const int source = int(head.source);
    if (source < 0 || source >= size) return;
    switch (head.type) {
        case PacketType::RECORDS: return records_arrived(packet);
        case PacketType::MESSAGE:
            messages_[source].packets.emplace_back(packet.rest().begin(), packet.rest().end());
            return world->wake();
        case PacketType::PULL: {
            const auto address = reinterpret_cast<const std::byte*>(packet.next<uint64_t>());
            const auto bytes = packet.next<uint64_t>();
            return messages_[source].pulled(*world->link, members_[source], message_tag(), address, bytes);
        }
        case PacketType::FAILURE: {
            const auto error = packet.next<rc_error>();
            if (packet.complete()) share_failure(Failure(error));  // not all may be connected to its sender
            return;
        }
        case PacketType::CLOSED: left_after_[source].store(packet.next<uint64_t>()); return world->wake();
        case PacketType::QUERY: return answer_query(source, packet);
        case PacketType::STATUS: return answer_arrived(packet);
    }
}

void NetworkGroup::records_arrived(PacketReader& packet) {
    const auto agreement = packet.next<uint64_t>();
    for (auto host = packet.next<uint32_t>(); !packet.rest().empty(); ++host) {
        const Bytes record = packet.take(packet.next<uint64_t>());
        records(agreement)[host % layout.hosts()].assign(record.begin(), record.end());
    }
}

// A rank of each host at least, as a rule; the others of that host find it in their memory.
void NetworkGroup::send_to_connected(Bytes packet) const {
    for (int r = 0; r < size; ++r) {
        if (here_[r] < 0 && world->link->connected(members_[r]) && may_answer(r))
            world->send_packet(members_[r], packet);
    }
}

// What it has missed.
void NetworkGroup::connected(int process) {
    const int r = index_of(process, members_);
    if (r < 0) return;
    const auto tell = [&](const PacketWriter& packet) { world->send_packet(process, packet.packet()); };
    if (failure_->set.load()) tell(failure_packet());
    if (messages_[r].unsent_close) {
        PacketWriter packet(head(PacketType::MESSAGE));
        packet.add(*messages_[r].unsent_close);
        tell(packet);
    }
    if (closing()) tell(closed_packet());
}

// It has closed this group before it told this rank, unless it is lost with its host.
void NetworkGroup::left(int process) {
    const int r = index_of(process, members_);
    if (r < 0 || has_lost_rank(layout.host_of(r))) return;
    uint64_t open = OPEN;
    left_after_[r].compare_exchange_strong(open, UNKNOWN);
}

void NetworkGroup::fail_for(const std::string& what_this_rank_cannot) {
    share_failure(Failure(RC_SYSTEM, format("rank %d ", rank) + what_this_rank_cannot, rank));
}

void NetworkGroup::hear_from(int r) {
    if (here_[r] >= 0) return;
    const std::lock_guard lock(world->mutex);
    world->link->connect(members_[r]);
}

// After a change in the memory of this host, in which a rank that sleeps on its link does not look.
void NetworkGroup::wake_host() const {
    for (const int r : layout.ranks[layout.host]) {
        if (r != rank) world->wake_peer(members_[r]);
    }
}

bool NetworkGroup::closed(int r) const {
    const int here = shares_memory(r);
    return here >= 0 ? local.group->closed(here) : left_after_[r].load() != OPEN;
}

uint64_t NetworkGroup::last_finished(int r) const {
    const int here = shares_memory(r);
    return here >= 0 ? local.group->arena().between_hosts(here).finished.load() : left_after_[r].load();
}

void NetworkGroup::finish(uint64_t epoch) {
    finished_.store(epoch);
    if (local.group) local.group->arena().between_hosts(layout.local_rank).finished.store(epoch);
}

void NetworkGroup::start_closing() {
    PeerGroup::start_closing();
    if (local.group) local.group->start_closing();  // so that nobody there reads memory of this rank any more
    const std::lock_guard lock(world->mutex);
    wake_host();
    for (const PacketWriter& packet : last_packets()) send_to_connected(packet.packet());
    world->wake();
}

PacketWriter NetworkGroup::closed_packet() const {
    PacketWriter packet(head(PacketType::CLOSED));
    packet.add(finished_.load());
    return packet;
}

// Some may not have heard of the failure, and would take this rank for its cause.
std::vector<PacketWriter> NetworkGroup::last_packets() const {
    std::vector<PacketWriter> packets;
    if (failure_->set.load()) packets.push_back(failure_packet());
    packets.push_back(closed_packet());
    return packets;
}

void NetworkGroup::finish_closing() {}

std::vector<std::shared_ptr<FailureState>> NetworkGroup::lineage() const {
    auto lineage = ancestors_;
    lineage.push_back(failure_);
    return lineage;
}

}  // namespace ringcomm
