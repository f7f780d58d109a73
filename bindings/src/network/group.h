// A group whose ranks run on several hosts: the ranks of a host share memory, and a link connects all.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/queue.h"
#include "core/peer_group.h"
#include "network/channel.h"
#include "network/host_channel.h"
#include "network/program.h"
#include "network/world.h"
#include "shm/group.h"

namespace ringcomm {

// Which ranks of a group run on which host.
struct HostLayout {
    std::vector<std::vector<int>> ranks;  // of each host, in the order of their local ranks
    int host;                             // of this rank
    int local_rank;

    int hosts() const { return int(ranks.size()); }
    int local_size() const { return int(ranks[host].size()); }
    int host_of(int rank) const;
    int local_rank_of(int rank) const { return index_of(rank, ranks[host]); }  // -1: on another host
    size_t largest() const;                                                    // number of ranks on one host
};

// The ranks of this host, which share memory; nullptr where every host has one rank.
struct LocalRanks {
    std::shared_ptr<void> keep_alive;
    ShmGroup* group = nullptr;
    CollectiveQueue* collectives = nullptr;
    std::shared_ptr<FlightRecord> flight;  // of this rank
};

class NetworkGroup;

// The first failure of a group, for the group and those split from it.
struct FailureState {
    const int size;
    const std::vector<int> here;  // the ranks on this host
    NetworkGroup* group;          // under the world's mutex; nullptr: it was freed
    std::atomic<bool> set{false};
    std::optional<Failure> failure;  // written once, before `set`

    FailureState(int size, std::vector<int> here, NetworkGroup* group)
        : size(size), here(std::move(here)), group(group) {}
};

// Of a group: UCX's tags have room for no more.
constexpr int NUMBER_BITS = 43;

struct NetworkGroupSpec {
    uint64_t number;           // of the group, the same on all ranks
    std::vector<int> members;  // the process on the link of each rank
    int rank;
    HostLayout layout;
    LocalRanks local;
    std::vector<std::shared_ptr<FailureState>> ancestors;
};

class NetworkGroup final : public PeerGroup, PacketHandler {
public:
    NetworkGroup(std::shared_ptr<NetworkWorld> world, NetworkGroupSpec spec, const rc_tuning& tuning);
    ~NetworkGroup();

    const std::shared_ptr<NetworkWorld> world;
    const HostLayout layout;
    const LocalRanks local;
    ProgramCache programs;
    std::function<int(const CallRecord&)> record_program;  // returns a status

    void ensure_ready() override;
    void on_spin_expired() override {
        if (local.group) local.group->on_spin_expired();
    }
    bool yield() override { return local.group ? local.group->yield() : PeerGroup::yield(); }
    void check_failure() const override;
    bool has_failed() const override;
    void store_failure(const Failure& failure) override;
    int member(int r) const override { return members_[r]; }
    std::string how_it_ended(int r) override;
    bool closed(int r) const override;
    void hear_from(int r) override;
    void prepare(const CallRecord& call) override;
    void run_collective(const CallRecord& call) override;
    std::unique_ptr<PacketChannel> open_channel(int peer) override;
    void progress() override;
    Sleeper& sleeper() override {
        if (host_sleeper_) return *host_sleeper_;
        return *world;
    }
    uint64_t id() const override { return number_; }
    RankReport report(int r, int calls) const override;
    void start_closing() override;
    void finish_closing() override;

    const std::vector<int>& members() const { return members_; }
    std::vector<std::shared_ptr<FailureState>> lineage() const;  // for a group split from this one
    PacketHead head(PacketType type) const { return {number_, type, uint32_t(rank)}; }
    // Of transfers in collectives, and in messages.
    uint64_t tag() const { return 2 * number_; }
    uint64_t message_tag() const { return 2 * number_ + 1; }

    // For the one collective in flight. Where nobody knows what a rank has finished that has left, it has, unless this
    // rank still waits for it: they were never connected.
    bool finished(int r, uint64_t epoch, bool is_awaited) const {
        const uint64_t last = last_finished(r);
        return closed(r) && last >= epoch && !(is_awaited && last == UNKNOWN);
    }
    std::byte* scratch(size_t bytes);
    // All ranks reach agreements in the same order. While one is being reached, a host may begin the next, but not the
    // one after.
    uint64_t next_agreement() { return ++agreements_; }
    // Under the world's mutex: the records that hosts have contributed to an agreement; empty: not yet.
    std::vector<std::vector<std::byte>>& records(uint64_t agreement) { return records_[agreement & 1]; }
    // Asks a rank of each host where its ranks are, and gives it a moment to answer.
    struct Status {
        uint64_t begun;     // epoch
        bool runs;          // neither dead nor stopped
        RankReport report;  // its last calls
    };
    std::vector<std::optional<Status>> query(int calls) const;
    // A failure among the ranks of this host, as one of the group or of an ancestor.
    Failure from_host(const Failure& failure, const std::string& what);

private:
    static constexpr uint64_t OPEN = UINT64_MAX, UNKNOWN = OPEN - 1;

    // The local rank of one that shares memory with this one, else -1.
    int shares_memory(int r) const { return local.group ? here_[r] : -1; }
    uint64_t last_finished(int r) const;
    void finish(uint64_t epoch);
    void packet_arrived(const PacketHead& head, PacketReader& packet) override;
    void records_arrived(PacketReader& packet);
    void hear_host();
    std::optional<Failure> stored_between_hosts() const;
    Failure from_ancestor(const SharedFailure& stored, FailureState& ancestor);
    // What a call raises. An abort by a rank that has found a mismatch in the same call may come before the records
    // that show it: the call is a mismatch here as well.
    Failure as_mismatch(const Failure& failure, const CallRecord& call) const;
    // "" if rank `r` has left, or runs.
    std::string how_it_died(int r);
    // Under the world's mutex.
    void share_failure(const Failure& failure);
    bool set_failure(const Failure& failure);
    PacketWriter failure_packet() const;
    PacketWriter closed_packet() const;
    std::vector<PacketWriter> last_packets() const;  // of a rank that leaves
    void connected(int process) override;
    void left(int process) override;
    void fail_for(const std::string& what_this_rank_cannot) override;
    bool has_lost_rank(int host) const;
    void send_to_connected(Bytes packet) const;
    bool may_answer(int r) const { return !closed(r) && !world->lost(members_[r]); }
    void ask_hosts(Bytes query) const;
    void ask_again(Bytes query) const;
    void wake_host() const;
    void answer_query(int source, PacketReader& packet);
    void answer_arrived(PacketReader& packet);
    Status status_here(int local_rank, int calls) const;

    const uint64_t number_;
    const std::vector<int> members_;
    std::vector<int> here_;  // the local rank of each rank, -1 on another host
    const std::vector<std::shared_ptr<FailureState>> ancestors_;
    const std::shared_ptr<FailureState> failure_;
    // Of the ranks on other hosts: OPEN, or the last epoch that each has finished; UNKNOWN, if it has left unheard.
    std::unique_ptr<std::atomic<uint64_t>[]> left_after_;
    std::atomic<uint64_t> finished_{0};
    std::optional<Failure> mismatch_;  // the last one; under the world's mutex
    uint64_t agreements_ = 0;
    std::vector<std::vector<std::byte>> records_[2];
    std::vector<PeerMessages> messages_;  // for the channels, by rank
    std::optional<HostSleeper> host_sleeper_;
    mutable std::vector<std::optional<Status>> statuses_;
    mutable uint64_t asked_ = 0;  // ns
    mutable int asked_calls_ = 0;
    std::vector<std::byte> scratch_;
};

}  // namespace ringcomm
