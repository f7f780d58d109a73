// A communicator on one rank: the arena of the group, its waits and its first failure.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shm/regions.h"
#include "shm/waiting.h"
#include "shm/world.h"

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
    const SpinPolicy spin_policy;
    RegionTable regions;

    Arena& arena() const { return *group_.arena; }
    const Group& group() const { return group_; }
    const std::vector<Group>& ancestors() const { return ancestors_; }
    RankHeader& header(int r) const { return arena().rank(r); }
    RankHeader& mine() const { return arena().rank(rank); }
    const rc_tuning& tuning() const { return world->tuning; }

    // Throws if the communicator is closed or broken. Allocates its memory at first use.
    void ensure_ready();
    // Throws the first failure of this communicator or an ancestor.
    void check_failure() const;
    // Whether a failure is stored, or being stored, for this communicator or an ancestor.
    bool has_failed() const;
    // Stores the first failure for all ranks and wakes them; fail() then throws the stored failure.
    void store_failure(const Failure& failure);
    [[noreturn]] void fail(const Failure& failure);
    bool closed(int r) const { return header(r).state.load() == RANK_CLOSED; }
    // The failure if rank `r` has died or closed; `what` describes the call that needs it.
    std::optional<Failure> peer_failure(int r, const std::string& what);
    // Runs Python's signal handlers (main thread only); throws if one raised.
    void check_interrupt(const char* what);
    // Whether this thread runs a signal handler inside a wait of this communicator: it must not wait for the
    // interrupted call, which is further up its own stack.
    bool interrupted_here() const;
    // What ends any wait: a failure on some rank, close() or a signal.
    std::optional<Failure> stop_reason(const char* what);

    // Publishes to all peers, which may sleep for this rank.
    template <Site site>
    void publish_to_all(Flag& flag, uint64_t value) {
        publish<site>(flag, value);
        for (int p = 0; p < size; ++p) {
            if (p != rank) ring(header(p).doorbell, rank);
        }
    }

    // For threads of one process that access each other's private memory. A rank that leaves a failed call waits until
    // its peers have ended their access; one that begins later sees the failure.
    void begin_peer_access();
    void end_peer_access() { mine().accesses_peers.store(0, std::memory_order_release); }
    void await_peer_access();

    uint64_t flight_start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start);
    void flight_end(uint64_t number, int status);
    std::string report(int r, int calls) const;  // the last calls of rank r, in one line
    // `message` with a line per rank, the ranks in `first` before the others.
    std::string with_report(const std::string& message, const std::vector<int>& first) const;

    // Scratch memory of the one collective that may run.
    std::vector<const void*> sources;
    std::atomic<uint64_t> last_path{0};  // of the last collective: chunks × RC_PATHS + rc_path
    std::vector<std::byte> tile;
    Access access();

    bool closing() const { return closing_.load(std::memory_order_relaxed); }
    void start_closing();   // wakes the waiters of this rank, and notifies the peers
    void finish_closing();  // no thread of this rank may access the arena afterwards

private:
    void allocate_arena();

    const Group group_;
    const std::vector<Group> ancestors_;
    std::atomic<bool> closing_{false};
    std::mutex allocation_mutex_;
    std::atomic<bool> allocated_{false};
    std::optional<Access> access_;
};

// The value of a flag after `chunk` chunks of call `epoch`. It wraps around after 2^40 calls, so positions are compared
// by difference; the offset makes every process pass the wrap after 1,000 calls, where tests cover it.
constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 24;
inline uint64_t position(uint64_t epoch, uint64_t chunk) { return (epoch - 1000) * MOST_CHUNKS + chunk; }

uint64_t deadline_of(uint64_t start, double seconds);

}  // namespace ringcomm
