// A communicator as one rank sees it: the arena of the group, the epoch, the waits and the first failure.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "regions.h"
#include "waiting.h"
#include "world.h"

namespace ringcomm {

extern std::atomic<uint64_t> fork_generation;
extern std::atomic<int (*)()> interrupt_function;

class Comm;
// The communicator in whose wait this thread's signal handlers run right now: they must not wait for what lies beneath
// them on the same stack.
extern thread_local const Comm* handling_signals_in;

constexpr size_t TILE_BYTES = 16 << 10;  // stays in the first-level cache while it is reduced, then copied

class Comm {
public:
    // `members[i]`: the rank in the world of rank i.
    Comm(std::shared_ptr<World> world, std::shared_ptr<Arena> arena, std::vector<std::shared_ptr<Arena>> ancestors,
         int rank, std::vector<int> members);

    const int rank, size;
    const std::shared_ptr<World> world;
    const std::vector<int> members;
    const uint64_t generation;
    const Patience patience;
    RegionTable regions;

    Arena& arena() const { return *arena_; }
    std::shared_ptr<Arena> shared_arena() const { return arena_; }
    const std::vector<std::shared_ptr<Arena>>& ancestors() const { return ancestors_; }
    RankHeader& header(int r) const { return arena_->rank(r); }
    RankHeader& mine() const { return arena_->rank(rank); }
    const rc_tuning& tuning() const { return world->tuning; }

    // Throws if the communicator cannot run a call: closed, from before a fork, or broken. Backs its memory at first
    // use.
    void ready();
    void check_failure() const;
    // Stores the first failure for all ranks and wakes them; `fail` then throws what is stored.
    void store_failure(const Failure& failure);
    [[noreturn]] void fail(const Failure& failure);
    // The failure if rank `r` has died or closed; `what` says what this rank needs it for.
    std::optional<Failure> gone(int r, const std::string& what);
    // Lets Python handle signals (main thread only); throws if the handler raised.
    void check_interrupt(const char* what);
    // What ends every wait: a failure somewhere, closing, a signal.
    std::optional<Failure> look(const char* what);

    // Flags are published to all peers; `bell` tells which of their bells.
    template <Site site>
    void publish_to_all(Flag& flag, uint64_t value) {
        publish<site>(flag, value);
        for (int p = 0; p < size; ++p) {
            if (p != rank) ring(header(p).bell, rank);
        }
    }

    uint64_t flight_start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start);
    void flight_end(uint64_t number, int status);
    std::string report(int calls) const;

    // Working memory of the one collective that may run.
    std::vector<const void*> sources;
    std::vector<std::byte> tile;

    bool closing() const { return closing_.load(std::memory_order_relaxed); }
    void start_closing();   // wakes the waiters of this rank
    void finish_closing();  // nobody of this rank is inside any more

private:
    void back();
    std::string report_rank(int r, int calls) const;

    std::shared_ptr<Arena> arena_;
    std::vector<std::shared_ptr<Arena>> ancestors_;
    std::atomic<bool> closing_{false};
    std::atomic<bool> backed_{false};
};

inline uint64_t position(uint64_t epoch, uint64_t chunk) { return (epoch << 24) + chunk; }
uint64_t deadline_of(uint64_t start, double seconds);

}  // namespace ringcomm
