// ShmGroup: a communicator on one rank, from its arena to its first failure.
#include "shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "shm/channel.h"
#include "shm/shrink.h"

namespace ringcomm {

namespace {

void store(Arena& arena, const rc_error& error, int between = 0) {
    SharedFailure& shared = arena.group().failure;
    uint32_t none = 0;
    if (shared.state.compare_exchange_strong(none, 1)) {
        shared.error = error;
        shared.between = between;
        shared.state.store(2, std::memory_order_release);
        for (int p = 0; p < arena.size; ++p) {
            wake_all(arena.rank(p).doorbell);
            wake_all(arena.rank(p).p2p_doorbell);
        }
    }
    // Another rank may be writing its own: that takes a few microseconds, unless it died meanwhile.
    for (int i = 0; i < 1000 && shared.state.load() != 2; ++i) yield_core();
}

}  // namespace

ShmGroup::ShmGroup(std::shared_ptr<World> world, GroupMemory memory, std::vector<GroupMemory> ancestors, int rank,
                   const rc_tuning& tuning)
    : PeerGroup(rank, memory.arena->size, tuning, memory.arena->rank(rank).flight, world->drains),
      world(std::move(world)),
      sources(size),
      tile(TILE_BYTES),
      staging_stores(tuning.nontemporal_bytes),
      memory_(std::move(memory)),
      ancestors_(std::move(ancestors)),
      sleeper_(mine().p2p_doorbell) {}

void ShmGroup::ensure_ready() {
    PeerGroup::ensure_ready();
    allocate();
}

void ShmGroup::allocate() {
    if (allocated_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(allocation_mutex_);
    if (allocated_.load()) return;
    try {
        arena().allocate(rank);
    } catch (const Failure& failure) {
        store_failure(failure);  // or the others would wait for this rank
        throw;
    }
    // Before this rank's first start record, which all ranks read before these flags.
    for (Flag* flag : {&mine().staged, &mine().reduced, &mine().collected}) flag->store(position(0, 0));
    for (int p = 0; p < size; ++p) header(p).member.store(memory_.members[p]);  // also of a rank that never calls
    mine().pid.store(getpid());
    GroupHeader& header = arena().group();
    header.size.store(size);
    header.part_bytes.store(arena().layout.part_bytes);
    header.magic.store(ARENA_MAGIC);
    if (is_world()) world->cma.publish_secret(mine());
    allocated_.store(true);
}

Access ShmGroup::access() {
    if (!access_) {
        access_ = Access::LOAD;
        for (int member : memory_.members) {
            if (!world->cma.same_process(member)) access_ = std::min(*access_, Access::COPY);
            if (!world->cma.available(member)) access_ = Access::NONE;
        }
    }
    return *access_;
}

const RankTree* ShmGroup::find_tree() {
    tree_known_ = true;
    if (!tuning().tree_wait_ns) return nullptr;
    std::vector<Domain> domains;
    for (const int member : memory_.members) {
        const RankHeader& of = world->arena->rank(member);
        domains.push_back({of.node.load(), of.cache.load()});
    }
    tree_ = shorter_tree(domains);
    return tree_.get();
}

std::shared_ptr<std::byte> ShmGroup::resolve(uint64_t location) {
    try {
        auto address = world->heaps.resolve(location);
        return address ? address : symmetric_buffers.resolve(location);
    } catch (const Failure& failure) {  // it cannot be mapped: the peers need not wait for this rank
        fail(failure);
    }
}

// Both sides modify the same word, so the later read-modify-write sees the earlier one's prior writes.
void ShmGroup::begin_peer_access() {
    mine().accesses_peers.exchange(1);
    check_failure();
    for (int p = 0; p < size; ++p) {
        if (closed(p)) fail(*peer_failure(p, "a call that uses its memory"));
    }
}

bool ShmGroup::await_peer_access() {
    end_peer_access();
    bool ended = true;
    for (int p = 0; p < size; ++p) {
        const int member = memory_.members[p];
        while (header(p).accesses_peers.fetch_or(0) && !world->liveness.dead(member)) {
            if (world->liveness.stopped(member)) {
                ended = false;
                break;
            }
            yield_core();
        }
    }
    return ended;
}

bool ShmGroup::runs(int r) const {
    const int member = memory_.members[r];
    return !world->liveness.dead(member) && !world->liveness.stopped(member);
}

ShmGroup::StoredFailure ShmGroup::stored_failure() const {
    const auto of = [](const GroupMemory& group) {
        const SharedFailure& failure = group.arena->group().failure;
        return failure.state.load(std::memory_order_acquire) == 2 ? &failure : nullptr;
    };
    if (const SharedFailure* failure = of(memory_)) return {failure, -1};
    for (size_t i = 0; i < ancestors_.size(); ++i) {
        if (const SharedFailure* failure = of(ancestors_[i])) return {failure, int(i)};
    }
    return {nullptr, -1};
}

void ShmGroup::check_failure() const {
    const auto [stored, ancestor] = stored_failure();
    if (!stored) return;
    Failure failure(stored->error);
    if (ancestor >= 0) throw of_ancestor(failure, stored->between ? stored->between : ancestors_[ancestor].arena->size);
    if (stored->between) {
        failure.error.rank = -1;  // it has another number here, or none
        if (!failure.error.group_size) failure.error.group_size = stored->between;
    }
    throw failure;
}

bool ShmGroup::has_failed() const {
    const auto fails = [](const GroupMemory& group) { return group.arena->group().failure.state.load() != 0; };
    return fails(memory_) || std::any_of(ancestors_.begin(), ancestors_.end(), fails);
}

void ShmGroup::store_failure(const Failure& failure) {
    const int culprit = failure.error.rank;
    store(*memory_.arena, failure.error);
    if (failure.error.code != RC_PEER_LOST || culprit < 0 || closed(culprit)) return;
    const std::string how = how_it_ended(culprit);
    if (how.empty()) return;
    // A death concerns all groups of the world: store it in each, so that all ranks report the same rank.
    for (const GroupMemory& ancestor : ancestors_) {
        store(*ancestor.arena, death_in_split(index_of(member(culprit), ancestor.members), how).error);
    }
}

void ShmGroup::store_failure_between_hosts(const Failure& failure, int size) {
    store(*memory_.arena, failure.error, size);
}

std::string ShmGroup::how_it_ended(int r) {
    Liveness& liveness = world->liveness;
    const int member = memory_.members[r];
    if (!liveness.dead(member)) return {};
    return format("(process %" PRId64 ") ", liveness.pid(member)) + liveness.how_it_ended(member);
}

void ShmGroup::on_spin_expired() {
    if (!tuning().oversubscribed) world->placement.leave_shared_core(memory_.members[rank]);
}

std::unique_ptr<PacketChannel> ShmGroup::open_channel(int peer) { return std::make_unique<ShmChannel>(*this, peer); }

RankReport ShmGroup::report(int r, int calls) const {
    const FlightRecord& flight = header(r).flight;
    return {r, state(r), flight.waits_for.load() - 1, flight.last(calls)};
}

std::string ShmGroup::state(int r) const {
    const int member = memory_.members[r];
    if (closed(r)) return "closed";
    if (world->liveness.dead(member)) return "dead";
    if (world->liveness.stopped(member)) return format("process %" PRId64 " is stopped", world->liveness.pid(member));
    return "";
}

FlightRecord& ShmGroup::open_between_hosts(int group_size, int process, int processes) {
    allocate();
    arena().allocate_between_hosts(rank);
    FlightBetweenHosts& flight = arena().between_hosts(rank);
    flight.group_size = group_size;
    flight.process = process;
    flight.processes = processes;
    mine().is_between_hosts.store(1);
    return flight.record;
}

void ShmGroup::start_closing() {
    mine().state.store(RANK_CLOSED);  // first: a peer that sees it begins no access to what a woken caller releases
    PeerGroup::start_closing();
    for (int p = 0; p < size; ++p) {
        wake_all(header(p).doorbell);
        wake_all(header(p).p2p_doorbell);
    }
}

void ShmGroup::finish_closing() {
    // The world's arena ends with the file; the last rank to leave another group discards its range. One that was left
    // out still has to see that the others have closed.
    mine().detached.store(1);
    if (is_world()) return;
    for (int r = 0; r < size; ++r) {
        if (!header(r).detached.load() && !world->liveness.dead(memory_.members[r])) return;
    }
    arena().discard();
}

ShmGroup::Shrunk ShmGroup::shrink(uint64_t deadline) {
    allocate();  // this rank may have made no call here
    // Peers that wait in a call, for a failure that is this rank's own, shall come too.
    if (!has_failed()) store_failure(Failure(RC_ABORTED, format("rank %d has called shrink", rank), rank));
    Survivors survivors = agree_on_survivors(*this, deadline);
    const std::vector<int>& ranks = survivors.ranks;
    const int left = int(ranks.size());
    GroupMemory next{std::make_shared<Arena>(world->file, survivors.offset, left, tuning().arena_bytes), {}};
    for (int r : ranks) next.members.push_back(memory_.members[r]);
    return {
        std::make_unique<ShmGroup>(world, std::move(next), std::vector<GroupMemory>{}, index_of(rank, ranks), tuning()),
        ranks};
}

}  // namespace ringcomm
