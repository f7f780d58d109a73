// NetworkGroup: its first failure. Each rank that stores it sends it to the ranks that are connected, and through the
// memory of its host, so that all hear of it.
#include <algorithm>
#include <cstring>

#include "network/group.h"

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
    if (set_failure(failure)) send_to_connected(failure_packet().packet());
}

PacketWriter NetworkGroup::failure_packet() const {
    PacketWriter packet(head(PacketType::FAILURE));
    packet.add(failure_->failure->error);
    return packet;
}

bool NetworkGroup::set_failure(const Failure& failure) {
    if (failure_->set.load()) return false;
    world->has_failed = true;
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

}  // namespace ringcomm
