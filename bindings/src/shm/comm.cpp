// Comm: a communicator on one rank, from its arena to its first failure.
#include "shm/comm.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <mutex>
#include <utility>

#include "core/errors.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace ringcomm {

std::atomic<uint64_t> fork_generation{0};
std::atomic<int (*)()> interrupt_function{nullptr};

namespace {

// The waits of this thread in which a signal handler is running, innermost first.
struct HandlerFrame {
    const Comm* comm;
    const HandlerFrame* outer;
};
thread_local const HandlerFrame* handler_frames = nullptr;

// A rank of one group in the numbering of another; -1 if it is no member there.
int translated(int rank, const std::vector<int>& from, const std::vector<int>& to) {
    if (rank < 0) return -1;
    const auto found = std::find(to.begin(), to.end(), from[rank]);
    return found == to.end() ? -1 : int(found - to.begin());
}

void store(Arena& arena, const rc_error& error) {
    SharedFailure& shared = arena.group().failure;
    uint32_t none = 0;
    if (shared.state.compare_exchange_strong(none, 1)) {
        shared.error = error;
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

uint64_t deadline_of(uint64_t start, double seconds) {
    // Beyond a century means never, so that the product cannot overflow. `start` may be a tick old, so add one.
    return seconds > 3e9 ? UINT64_MAX : start + TICK_NS + uint64_t(std::fmax(seconds, 0) * 1e9);
}

Comm::Comm(std::shared_ptr<World> world, Group group, std::vector<Group> ancestors, int rank)
    : rank(rank),
      size(group.arena->size),
      world(std::move(world)),
      spin_policy(this->world->tuning.oversubscribed ? OVERSUBSCRIBED : DEDICATED),
      sources(size),
      tile(TILE_BYTES),
      group_(std::move(group)),
      ancestors_(std::move(ancestors)) {}

void Comm::ensure_ready() {
    if (closing()) throw Failure(RC_CLOSED, "this communicator is closed", rank);
    check_failure();
    if (!allocated_.load(std::memory_order_relaxed)) allocate_arena();
}

void Comm::allocate_arena() {
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
    if (ancestors_.empty()) world->cma.publish_secret(mine());
    allocated_.store(true);
}

Access Comm::access() {
    if (!access_) {
        access_ = Access::LOAD;
        for (int member : group_.members) {
            if (!world->cma.same_process(member)) access_ = std::min(*access_, Access::COPY);
            if (!world->cma.available(member)) access_ = Access::NONE;
        }
    }
    return *access_;
}

// Both sides modify the same word, so the later read-modify-write sees the earlier one's prior writes.
void Comm::begin_peer_access() {
    mine().accesses_peers.exchange(1);
    check_failure();
    for (int p = 0; p < size; ++p) {
        if (closed(p)) fail(*peer_failure(p, "a call that uses its memory"));
    }
}

void Comm::await_peer_access() {
    end_peer_access();
    for (int p = 0; p < size; ++p) {
        while (header(p).accesses_peers.fetch_or(0)) yield_core();
    }
}

void Comm::check_failure() const {
    const auto check = [this](const Group& group) {
        const SharedFailure& failure = group.arena->group().failure;
        if (failure.state.load(std::memory_order_acquire) != 2) return;
        if (group.arena == group_.arena) throw Failure(failure.error);
        Failure annotated(failure.error);
        annotated.error.group_size = group.arena->size;
        const std::string where =
            format("in the communicator of %d ranks that this one was split from: ", group.arena->size);
        copy_text(annotated.error.message, sizeof annotated.error.message, where + failure.error.message);
        throw annotated;
    };
    check(group_);
    for (const Group& ancestor : ancestors_) check(ancestor);
}

bool Comm::has_failed() const {
    const auto fails = [](const Group& group) { return group.arena->group().failure.state.load() != 0; };
    return fails(group_) || std::any_of(ancestors_.begin(), ancestors_.end(), fails);
}

void Comm::store_failure(const Failure& failure) {
    const int culprit = failure.error.rank;
    store(*group_.arena, failure.error);
    if (failure.error.code != RC_PEER_LOST || culprit < 0 || closed(culprit)) return;
    // A death concerns all groups of the world: store it in each, so that all ranks report the same rank.
    for (const Group& ancestor : ancestors_) {
        rc_error error = failure.error;
        error.rank = translated(culprit, group_.members, ancestor.members);
        copy_text(error.message, sizeof error.message,
                  format("rank %d (process %" PRId64 ") died while a group split from this communicator needed it",
                         error.rank, world->liveness.pid(group_.members[culprit])));
        store(*ancestor.arena, error);
    }
}

void Comm::fail(const Failure& failure) {
    if (failure.error.code == RC_CLOSED) throw failure;  // this rank only
    store_failure(failure);
    check_failure();
    throw failure;
}

std::optional<Failure> Comm::peer_failure(int r, const std::string& what) {
    const int64_t pid = world->liveness.pid(group_.members[r]);
    std::string how = "closed the communicator";
    if (!closed(r)) {
        if (!world->liveness.dead(group_.members[r])) return {};
        how = format("(process %" PRId64 ") ", pid) + world->liveness.how_it_ended(group_.members[r]);
    }
    return Failure(RC_PEER_LOST, format("rank %d ", r) + how + format(" while rank %d needed it for ", rank) + what, r);
}

void Comm::check_interrupt(const char* what) {
    const auto interrupt = interrupt_function.load();
    if (!interrupt || syscall(SYS_gettid) != getpid()) return;
    const HandlerFrame here{this, handler_frames};
    handler_frames = &here;
    const int raised = interrupt();
    handler_frames = here.outer;
    if (!raised) return;
    store_failure(Failure(RC_ABORTED, format("rank %d was interrupted by a signal during %s", rank, what), rank));
    throw Failure(RC_INTERRUPTED, format("%s was interrupted by a signal", what), rank);
}

bool Comm::interrupted_here() const {
    for (const HandlerFrame* wait = handler_frames; wait; wait = wait->outer) {
        if (wait->comm == this) return true;
    }
    return false;
}

std::optional<Failure> Comm::stop_reason(const char* what) {
    check_failure();
    check_interrupt(what);
    world->drain_all();
    if (closing()) return Failure(RC_CLOSED, format("this communicator was closed during %s", what), rank);
    return {};
}

void Comm::start_closing() {
    closing_.store(true);
    mine().state.store(RANK_CLOSED);
    for (int p = 0; p < size; ++p) {
        wake_all(header(p).doorbell);
        wake_all(header(p).p2p_doorbell);
    }
}

void Comm::finish_closing() {
    // The world's arena ends with the file; the last rank to leave a sub-group discards its range.
    const bool last = arena().group().departed.fetch_add(1) + 1 == size;
    if (last && !ancestors_.empty()) arena().discard();
}

}  // namespace ringcomm
