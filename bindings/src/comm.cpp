#include "comm.h"

#include <cinttypes>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "errors.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace ringcomm {

std::atomic<uint64_t> fork_generation{0};
std::atomic<int (*)()> interrupt_function{nullptr};
thread_local const Comm* handling_signals_in = nullptr;

uint64_t deadline_of(uint64_t start, double seconds) {
    // Beyond a century it is "never"; the product must not overflow.
    return seconds > 3e9 ? UINT64_MAX : start + uint64_t(std::fmax(seconds, 0) * 1e9);
}

Comm::Comm(std::shared_ptr<World> world, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Arena>> ancestors,
           int rank, std::vector<int> members)
    : rank(rank),
      size(arena->size),
      world(std::move(world)),
      members(std::move(members)),
      generation(fork_generation.load()),
      patience(this->world->tuning.oversubscribed ? OVERSUBSCRIBED : DEDICATED),
      sources(size),
      tile(TILE_BYTES),
      arena_(std::move(arena)),
      ancestors_(std::move(ancestors)) {}

void Comm::ready() {
    if (generation != fork_generation.load(std::memory_order_relaxed)) {
        throw Failure(RC_CLOSED, "this communicator belongs to the parent process: after a fork, call init again",
                      rank);
    }
    if (closing()) throw Failure(RC_CLOSED, "this communicator is closed", rank);
    check_failure();
    if (!backed_.load(std::memory_order_relaxed)) back();
}

void Comm::back() {
    try {
        arena_->back(rank);  // idempotent, should two threads come at once
    } catch (const Failure& failure) {
        store_failure(failure);  // the others would wait for this rank in vain
        throw;
    }
    mine().waits_for.store(-1);
    backed_.store(true);
}

void Comm::check_failure() const {
    const auto check = [](Arena& arena) {
        const SharedFailure& failure = arena.group().failure;
        if (failure.state.load(std::memory_order_acquire) == 2) throw Failure(failure.error);
    };
    check(*arena_);
    for (const auto& ancestor : ancestors_) check(*ancestor);
}

void Comm::store_failure(const Failure& failure) {
    SharedFailure& shared = arena_->group().failure;
    uint32_t none = 0;
    if (shared.state.compare_exchange_strong(none, 1)) {
        shared.error = failure.error;
        shared.state.store(2, std::memory_order_release);
        for (int p = 0; p < size; ++p) {
            ring_always(header(p).bell);
            ring_always(header(p).letter_bell);
        }
    }
    // Another rank may be writing its own: it is a few microseconds, unless it died in the middle.
    for (int i = 0; i < 1000 && shared.state.load() != 2; ++i) give_core_away();
}

void Comm::fail(const Failure& failure) {
    if (failure.error.code == RC_CLOSED) throw failure;  // local: the others are not concerned
    store_failure(failure);
    check_failure();
    throw failure;
}

std::optional<Failure> Comm::gone(int r, const std::string& what) {
    const bool closed = header(r).state.load(std::memory_order_acquire) == RANK_CLOSED;
    if (!closed && !world->dead(members[r])) return {};
    return Failure(RC_PEER_LOST,
                   closed
                       ? format("rank %d closed the communicator while rank %d needed it for %s", r, rank, what.c_str())
                       : format("rank %d (process %" PRId64 ") died while rank %d needed it for %s", r,
                                world->pid(members[r]), rank, what.c_str()),
                   r);
}

void Comm::check_interrupt(const char* what) {
    const auto interrupt = interrupt_function.load();
    if (!interrupt || syscall(SYS_gettid) != getpid()) return;
    const Comm* outer = std::exchange(handling_signals_in, this);
    const int raised = interrupt();
    handling_signals_in = outer;
    if (!raised) return;
    store_failure(Failure(RC_ABORTED, format("rank %d was interrupted by a signal during %s", rank, what), rank));
    throw Failure(RC_INTERRUPTED, format("%s was interrupted by a signal", what), rank);
}

std::optional<Failure> Comm::look(const char* what) {
    check_failure();
    check_interrupt(what);
    if (closing()) return Failure(RC_CLOSED, format("this communicator was closed during %s", what), rank);
    return {};
}

uint64_t Comm::flight_start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start) {
    constexpr auto relaxed = std::memory_order_relaxed;
    const uint64_t number = mine().flights.fetch_add(1, relaxed) + 1;
    FlightEntry& entry = mine().flight[number % FLIGHT_CALLS];
    entry.number.store(0, relaxed);
    entry.signature.store(signature, std::memory_order_release);
    entry.count.store(count, relaxed);
    entry.epoch.store(epoch, relaxed);
    entry.start.store(start, relaxed);
    entry.end.store(0, relaxed);
    entry.number.store(number, std::memory_order_release);
    return number;
}

void Comm::flight_end(uint64_t number, int status) {
    FlightEntry& entry = mine().flight[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_relaxed) != number) return;  // 1024 calls ago: overwritten
    entry.status.store(status, std::memory_order_relaxed);
    entry.end.store(now_ns(), std::memory_order_release);
}

std::string Comm::report(int calls) const {
    std::string text;
    for (int r = 0; r < size; ++r) text += report_rank(r, calls);
    return text;
}

std::string Comm::report_rank(int r, int calls) const {
    static const char* const outcomes[] = {"done",    "refused",     "mismatch",  "timed out", "peer lost",
                                           "aborted", "interrupted", "no memory", "closed",    "failed"};
    RankHeader& theirs = header(r);
    const uint64_t now = now_ns();
    std::string text = format("rank %d:", r);
    const char state = world->process_state(members[r]);
    if (theirs.state.load() == RANK_CLOSED) {
        text += " closed;";
    } else if (world->dead(members[r])) {
        text += " dead;";
    } else if (state == 'T' || state == 't') {
        text += format(" process %" PRId64 " is stopped;", world->pid(members[r]));
    }
    const int64_t last = theirs.flights.load();
    if (last == 0) text += " no call yet;";
    for (int64_t number = last; number > 0 && number > last - calls && number > last - FLIGHT_CALLS; --number) {
        const FlightEntry& entry = theirs.flight[number % FLIGHT_CALLS];
        const uint64_t signature = entry.signature.load(), count = entry.count.load(), epoch = entry.epoch.load();
        const uint64_t start = entry.start.load(), end = entry.end.load();
        const uint32_t status = entry.status.load();
        if (entry.number.load(std::memory_order_acquire) != uint64_t(number)) continue;
        text += " ";
        text += describe(signature, count);
        if (epoch) text += format(" epoch %" PRIu64, epoch);
        if (end) {
            text += format(", %s after %.6f s, %.3f s ago;", status < 10 ? outcomes[status] : "failed",
                           double(end - start) * 1e-9, now > end ? double(now - end) * 1e-9 : 0.0);
        } else {
            text += format(", running for %.3f s", now > start ? double(now - start) * 1e-9 : 0.0);
            const int waits_for = theirs.waits_for.load();
            text += waits_for >= 0 ? format(", waits for rank %d;", waits_for) : ";";
        }
    }
    text.back() = '\n';
    return text;
}

void Comm::start_closing() {
    closing_.store(true);
    ring_always(mine().bell);
    ring_always(mine().letter_bell);
}

void Comm::finish_closing() {
    mine().state.store(RANK_CLOSED);
    bool all = true;
    for (int p = 0; p < size; ++p) {
        if (p == rank) continue;
        all = all && header(p).state.load() == RANK_CLOSED;
        ring_always(header(p).bell);
        ring_always(header(p).letter_bell);
    }
    // The world's arena goes with the file; a sub-group's range is given back by whoever closes last.
    if (all && !ancestors_.empty()) arena_->give_back();
}

}  // namespace ringcomm
