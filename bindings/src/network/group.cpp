// NetworkGroup: failures, packets, and leaving.
#include "network/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "network/call.h"

namespace ringcomm {

namespace {

// The abort of a rank that a mismatch made leave: its peers may still be in that call, and raise the mismatch there.
// Its message has that of the mismatch, perhaps cut, whose first line names the call.
Failure after_mismatch(const Failure& abort, const Failure& mismatch) {
    const std::string text = mismatch.error.message;
    const char* const begin = strstr(abort.error.message, text.substr(0, text.find('\n')).c_str());
    if (!begin) return abort;  // it left for another reason
    rc_error error = mismatch.error;
    error.code = RC_ABORTED;
    error.peer = error.rank;
    error.rank = abort.error.rank;
    error.mismatch_at = int32_t(begin - abort.error.message);
    copy_text(error.message, sizeof error.message, abort.error.message);
    return Failure(error);
}

// A failure that names a rank by its number on its host.
void renumber(Failure& failure, int rank) {
    const std::string message = format("rank %d, which is rank %d on its host: ", rank, failure.error.rank);
    copy_text(failure.error.message, sizeof failure.error.message, message + failure.error.message);
    failure.error.rank = rank;
}

}  // namespace

int HostLayout::host_of(int rank) const {
    const auto has = [&](const std::vector<int>& host) { return std::count(host.begin(), host.end(), rank) > 0; };
    return int(std::find_if(ranks.begin(), ranks.end(), has) - ranks.begin());
}

size_t HostLayout::largest() const {
    size_t most = 0;
    for (const std::vector<int>& host : ranks) most = std::max(most, host.size());
    return most;
}

NetworkGroup::NetworkGroup(std::shared_ptr<NetworkWorld> given, NetworkMembership membership, const rc_tuning& tuning)
    : PeerGroup(membership.rank, int(membership.members.size()), tuning, *membership.local.flight, given->drains),
      world(std::move(given)),
      layout(std::move(membership.layout)),
      local(std::move(membership.local)),
      number_(membership.number),
      members_(std::move(membership.members)),
      ancestors_(std::move(membership.ancestors)),
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
    world->remove(number_);
    {
        const std::lock_guard lock(world->mutex);
        failure_->group = nullptr;
    }
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

// --- Failures --------------------------------------------------------------------------------------------------------

// Messages inside this host take memory that its communicator allocates at its first use.
void NetworkGroup::ensure_ready() {
    PeerGroup::ensure_ready();
    if (!local.group) return;
    try {
        local.group->ensure_ready();
    } catch (const Failure& failure) {
        fail(from_host(failure, "its next call"));
    }
}

void NetworkGroup::check_failure() const {
    if (failure_->set.load(std::memory_order_acquire)) throw *failure_->failure;
    for (const auto& ancestor : ancestors_) {
        if (!ancestor->set.load(std::memory_order_acquire)) continue;
        throw of_ancestor(*ancestor->failure, ancestor->size);
    }
}

bool NetworkGroup::has_failed() const {
    return failure_->set.load() ||
           std::any_of(ancestors_.begin(), ancestors_.end(), [](const auto& ancestor) { return ancestor->set.load(); });
}

Failure NetworkGroup::as_mismatch(const Failure& failure, const CallRecord& call) const {
    const rc_error& abort = failure.error;
    if (!abort.mismatch_at || abort.group_size || abort.epoch != call.epoch) return failure;
    const std::string own = describe(call.signature);
    const bool same = own == abort.expected;
    return Failure(RC_MISMATCH, abort.message + abort.mismatch_at, same ? abort.peer : abort.rank, own,
                   same ? abort.got : abort.expected);
}

void NetworkGroup::store_failure(const Failure& given) {
    const auto first = stored_between_hosts();
    Failure failure = first.value_or(given);
    const bool names_one = failure.error.code == RC_PEER_LOST && failure.error.rank >= 0 && !failure.error.group_size;
    const std::string death = names_one ? how_it_died(failure.error.rank) : "";
    const std::lock_guard lock(world->mutex);
    if (!first && failure.error.code == RC_ABORTED && mismatch_ && mismatch_->error.epoch == flight.epoch.load()) {
        failure = after_mismatch(failure, *mismatch_);
    }
    share_failure(failure);
    if (death.empty()) return;
    // A death concerns all groups of the world: store it in each, so that all ranks report the same rank.
    for (const auto& ancestor : ancestors_) {
        if (!ancestor->group) continue;
        const std::vector<int>& members = ancestor->group->members();
        ancestor->group->share_failure(death_in_split(index_of(member(failure.error.rank), members), death));
    }
}

void NetworkGroup::share_failure(const Failure& failure) {
    if (set_failure(failure)) send_failure();
}

void NetworkGroup::send_failure() const {
    PacketWriter packet(head(PacketType::FAILURE));
    packet.add(failure_->failure->error);
    send_to_other_hosts(packet.packet());
}

bool NetworkGroup::set_failure(const Failure& failure) {
    if (failure_->set.load()) return false;
    // Inside this host first: afterwards a rank takes back memory from which a message is read there.
    if (local.group && !local.group->closing()) local.group->store_failure_between_hosts(failure, size);
    wake_host();
    failure_->failure = failure;
    failure_->set.store(true, std::memory_order_release);
    for (const uint64_t unused : {tag(), message_tag()}) world->drop(unused);
    world->wake();
    return true;
}

// A rank of this host may have heard of a failure first.
void NetworkGroup::hear_host() {
    if (!local.group || has_failed()) return;
    const auto [stored, ancestor] = local.group->stored_failure();
    if (!stored) return;
    if (ancestor >= 0) return store_failure(from_ancestor(*stored, *ancestors_[ancestor]));
    const Failure failure(stored->error);
    store_failure(stored->between ? failure : from_host(failure, "a call of all ranks"));
}

std::optional<Failure> NetworkGroup::stored_between_hosts() const {
    if (!local.group || failure_->set.load()) return {};
    const auto [stored, ancestor] = local.group->stored_failure();
    return stored && ancestor < 0 && stored->between ? std::optional<Failure>(stored->error) : std::nullopt;
}

Failure NetworkGroup::from_host(const Failure& failure, const std::string& what) {
    Failure translated(failure);
    if (failure.error.group_size) {  // not of the communicator of this host
        const auto [stored, ancestor] = local.group->stored_failure();
        if (ancestor >= 0) return from_ancestor(*stored, *ancestors_[ancestor]);
        translated = Failure(stored->error);
        if (stored->between) return translated;
    }
    const int r = translated.error.rank;
    if (r < 0) return translated;
    const int number = layout.ranks[layout.host][r];
    if (translated.error.code == RC_PEER_LOST) {
        if (auto lost = peer_failure(number, what)) return *lost;
    }
    renumber(translated, number);
    return translated;
}

Failure NetworkGroup::from_ancestor(const SharedFailure& stored, FailureState& ancestor) {
    Failure failure(stored.error);
    const int r = failure.error.rank;
    if (!stored.between && r >= 0) renumber(failure, ancestor.here[r]);
    if (stored.between || failure.error.code == RC_PEER_LOST) {  // perhaps no rank that needed it tells other hosts
        const std::lock_guard lock(world->mutex);
        if (ancestor.group) ancestor.group->share_failure(failure);
    }
    return of_ancestor(failure, ancestor.size);
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
            if (packet.complete()) set_failure(Failure(error));
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

void NetworkGroup::send_to_other_hosts(Bytes packet) const {
    for (int r = 0; r < size; ++r) {
        if (here_[r] < 0 && !closed(r) && !world->lost(members_[r])) world->send_packet(members_[r], packet);
    }
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
    if (failure_->set.load()) send_failure();  // some may not have heard of it, and would take this rank for its cause
    PacketWriter packet(head(PacketType::CLOSED));
    packet.add(finished_.load());
    send_to_other_hosts(packet.packet());
    world->wake();
}

void NetworkGroup::finish_closing() {}

std::vector<std::shared_ptr<FailureState>> NetworkGroup::lineage() const {
    auto lineage = ancestors_;
    lineage.push_back(failure_);
    return lineage;
}

}  // namespace ringcomm
