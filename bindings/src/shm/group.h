// A communicator in shared memory, on one rank: the arena of the group and its first failure.
#pragma once

#include <algorithm>

#include "core/peer_group.h"
#include "core/stores.h"
#include "kernels/cpu/kernels.h"
#include "memory/doorbell.h"
#include "memory/symmetric_buffers.h"
#include "shm/rank_tree.h"
#include "shm/world.h"

namespace ringcomm {

constexpr size_t TILE_BYTES = 16 << 10;  // stays in the first-level cache while it is reduced, then copied

// The shared memory of a group of ranks; members[i] is the rank in the world of its rank i.
struct GroupMemory {
    std::shared_ptr<Arena> arena;
    std::vector<int> members;
};

// Which calls try the tree: all, and after one in which it failed one of 2, then of 4, at last of 64. They follow from
// a hash of the epoch, so that ranks which have given up at different times meet again.
class TreeAttempts {
public:
    bool is_due(uint64_t epoch) const { return (epoch * 0x9e3779b97f4a7c15 >> 58) % interval_ == 0; }
    void end(bool done) { interval_ = done ? 1 : std::min<uint64_t>(2 * interval_, 64); }

private:
    uint64_t interval_ = 1;
};

class ShmGroup final : public PeerGroup {
public:
    ShmGroup(std::shared_ptr<World> world, GroupMemory memory, std::vector<GroupMemory> ancestors, int rank,
             const rc_tuning& tuning);

    const std::shared_ptr<World> world;
    SymmetricBufferTable symmetric_buffers;

    Arena& arena() const { return *memory_.arena; }
    const GroupMemory& memory() const { return memory_; }
    const std::vector<GroupMemory>& ancestors() const { return ancestors_; }
    RankHeader& header(int r) const { return arena().rank(r); }
    RankHeader& mine() const { return arena().rank(rank); }
    StartRecord& record(int r, uint64_t epoch) const { return header(r).records[epoch & (record_slots_ - 1)]; }
    uint64_t run_ahead() const { return record_slots_ / 2; }  // calls whose records need not be compared yet

    void ensure_ready() override;  // allocates its memory at first use
    void check_failure() const override;
    bool has_failed() const override;
    void store_failure(const Failure& failure) override;
    // A failure of the group between hosts whose ranks on this host are those of this communicator.
    void store_failure_between_hosts(const Failure& failure, int size);
    // What check_failure() throws, as it was stored.
    struct StoredFailure {
        const SharedFailure* failure;  // nullptr: none
        int ancestor;                  // whose it is, by its place in ancestors(); -1: of this communicator
    };
    StoredFailure stored_failure() const;
    int member(int r) const override { return memory_.members[r]; }
    void allocate() override;
    bool used() const override { return allocated_.load(std::memory_order_acquire); }
    std::string how_it_ended(int r) override;
    bool closed(int r) const override { return header(r).state.load() == RANK_CLOSED; }
    // collectives/collectives.cpp, starts.cpp
    void run_collective(const CallRecord& call) override;
    bool can_start(const CallRecord& call) const override;
    void start_collective(const CallRecord& call) override;
    bool has_arrived(const CallRecord& call) const override;
    void confirm(uint64_t epoch, double timeout) override;
    // The ranks whose start records this one awaits before it ends a call: all, or, where data that fits a record goes
    // one way, from the root or to it, those that give this rank data.
    int awaited(const CallRecord& call) const;
    bool is_one_way(const CallRecord& call) const;
    void on_spin_expired() override;
    bool yield() override { return world->placement.yield(memory_.members[rank]); }
    std::unique_ptr<PacketChannel> open_channel(int peer) override;
    Sleeper& sleeper() override { return sleeper_; }
    uint64_t id() const override { return world->nonce ^ arena().offset * 0x9e3779b97f4a7c15; }
    RankReport report(int r, int calls) const override;
    std::string state(int r) const;  // of a report: "closed", say, or "" if rank r runs
    // The flight record of this rank in a group of several hosts whose ranks here are those of this communicator.
    FlightRecord& open_between_hosts(int group_size, int process, int processes);
    void start_closing() override;
    void finish_closing() override;
    // The survivors agree on who they are, and continue in another group: see shrink.h.
    struct Shrunk {
        std::unique_ptr<ShmGroup> group;
        std::vector<int> ranks;  // here
    };
    Shrunk shrink(uint64_t deadline);

    // Publishes to all peers, which may sleep for this rank.
    template <Site site>
    void publish_to_all(Flag& flag, uint64_t value) {
        publish<site>(flag, value);
        for (int p = 0; p < size; ++p) {
            if (p != rank) ring(header(p).doorbell, rank);
        }
    }

    // Where bytes of this rank lie in the file of the world, for its peers; 0: in private memory.
    uint64_t locate(const std::byte* address, size_t bytes) {
        const uint64_t location = world->heaps.locate(address, bytes);
        return location ? location : symmetric_buffers.locate(address, bytes);
    }
    // The address here of what a peer has located; it stays mapped while the result is held.
    std::shared_ptr<std::byte> resolve(uint64_t location);

    // Around every access to buffers of other ranks. A rank that leaves a failed call waits until its peers have ended
    // their access; one that begins later sees the failure.
    void begin_peer_access();
    void end_peer_access() { mine().accesses_peers.store(0, std::memory_order_release); }
    // Returns false if a peer may still access them: its process is stopped, and goes on once it continues.
    bool await_peer_access();
    // Whether the process of rank r is neither dead nor stopped.
    bool runs(int r) const;

    uint64_t verified = 0;      // the last call of which the records of all ranks have been compared
    uint64_t last_one_way = 0;  // call: see is_one_way()

    // Through which small data goes; nullptr: each rank reads that of all. In a call, because all ranks have published
    // their domains then.
    const RankTree* tree() { return tree_known_ ? tree_.get() : find_tree(); }
    TreeAttempts tree_attempts;

    // Scratch memory of the one collective that may run.
    std::vector<const void*> sources;
    std::vector<std::byte> tile;
    StagingStores staging_stores;
    OutputStores output_stores;
    Access access();

private:
    const RankTree* find_tree();
    bool is_world() const { return memory_.arena == world->arena; }

    const uint64_t record_slots_ = record_slots(size);
    const GroupMemory memory_;
    const std::vector<GroupMemory> ancestors_;
    AnySleeper sleeper_;
    std::mutex allocation_mutex_;
    std::atomic<bool> allocated_{false};
    std::optional<Access> access_;
    bool tree_known_ = false;
    std::unique_ptr<RankTree> tree_;
};

// The value of a flag after `chunk` chunks of call `epoch`. It wraps around after 2^40 calls, so positions are compared
// by difference; the offset makes every process pass the wrap after 1,000 calls, where tests cover it.
constexpr uint64_t MOST_CHUNKS = uint64_t{1} << 24;
inline uint64_t position(uint64_t epoch, uint64_t chunk) { return (epoch - 1000) * MOST_CHUNKS + chunk; }

}  // namespace ringcomm
