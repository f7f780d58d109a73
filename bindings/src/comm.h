// A communicator as one rank sees it: the arena of the group, the epoch, the waits and the first failure.
#pragma once

#include <memory>
#include <mutex>
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

constexpr size_t TILE_BYTES = 16 << 10;  // stays in the first-level cache while it is reduced, then copied

// The shared memory of a group of ranks; members[i] is the rank in the world of its rank i.
struct Group {
    std::shared_ptr<Arena> arena;
    std::vector<int> members;
};

class Comm {
public:
    Comm(std::shared_ptr<World> world, Group group, std::vector<Group> ancestors, int rank);

    const int rank, size;
    const std::shared_ptr<World> world;
    const Patience patience;
    RegionTable regions;

    Arena& arena() const { return *group_.arena; }
    const Group& group() const { return group_; }
    const std::vector<Group>& ancestors() const { return ancestors_; }
    RankHeader& header(int r) const { return arena().rank(r); }
    RankHeader& mine() const { return arena().rank(rank); }
    const rc_tuning& tuning() const { return world->tuning; }

    // Throws if the communicator cannot run a call: closed, or broken. Backs its memory at first use.
    void ready();
    // Throws the first failure of this communicator or of one that it was split from.
    void check_failure() const;
    // Whether a failure is stored, or being stored, for this communicator or one that it was split from.
    bool broken() const;
    // Stores the first failure for all ranks and wakes them; `fail` then throws what is stored.
    void store_failure(const Failure& failure);
    [[noreturn]] void fail(const Failure& failure);
    bool closed(int r) const { return header(r).state.load() == RANK_CLOSED; }
    // The failure if rank `r` has died or closed; `what` says what this rank needs it for.
    std::optional<Failure> gone(int r, const std::string& what);
    // Lets Python handle signals (main thread only); throws if the handler raised.
    void check_interrupt(const char* what);
    // Whether a signal handler runs on this thread, inside a wait for this communicator: it must not wait for what lies
    // beneath it on the same stack.
    bool interrupted_here() const;
    // What ends every wait: a failure somewhere, closing, a signal.
    std::optional<Failure> look(const char* what);

    // Flags are published to all peers, which may sleep for this rank.
    template <Site site>
    void publish_to_all(Flag& flag, uint64_t value) {
        publish<site>(flag, value);
        for (int p = 0; p < size; ++p) {
            if (p != rank) ring(header(p).bell, rank);
        }
    }

    // For threads of one process that use each other's private memory. Whoever leaves a call that has failed lets the
    // others end first; who would begin after that sees the failure.
    void intrude();
    void withdraw() { mine().intrudes.store(0, std::memory_order_release); }
    void await_intruders();

    uint64_t flight_start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start);
    void flight_end(uint64_t number, int status);
    std::string report(int r, int calls) const;  // the last calls of rank r, in one line
    // `message` with a line per rank, the ranks in `first` before the others.
    std::string with_report(const std::string& message, const std::vector<int>& first) const;

    // Working memory of the one collective that may run.
    std::vector<const void*> sources;
    std::atomic<uint64_t> way{0};  // how the last one was done, for those who ask: chunks × RC_WAYS + rc_way
    std::vector<std::byte> tile;
    Access access();

    bool closing() const { return closing_.load(std::memory_order_relaxed); }
    void start_closing();   // wakes the waiters of this rank, and tells the peers
    void finish_closing();  // nobody of this rank is inside any more; nothing may touch the arena after it

private:
    void back();

    const Group group_;
    const std::vector<Group> ancestors_;
    std::atomic<bool> closing_{false};
    std::mutex backing_;
    std::atomic<bool> backed_{false};
    std::optional<Access> access_;
};

// Where a flag stands after `chunk` chunks of call `epoch`. It wraps around after 2^40 calls, so positions are compared
// by their difference; the offset lets every process pass the wrap after 1,000 calls, where tests see it.
constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 24;
inline uint64_t position(uint64_t epoch, uint64_t chunk) { return (epoch - 1000) * MOST_CHUNKS + chunk; }

uint64_t deadline_of(uint64_t start, double seconds);

}  // namespace ringcomm
