// One collective of a network group in flight on this rank.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/running_collective.h"
#include "network/group.h"
#include "network/host_record.h"

namespace ringcomm {

class NetworkCall final : public RunningCollective {
public:
    NetworkCall(NetworkGroup& group, const CallRecord& call);

    void run();
    void prepare() const;  // records the programs of a large call

private:
    struct Slot;
    // Seconds more for waits inside a host: its ranks may wait for another host, and know why.
    static constexpr double MARGIN = 1.0;

    // Agreement (agreement.cpp). Afterwards the records of all hosts are here.
    void agree();
    HostRecord contribute();
    void exchange_records(HostRecord own);
    void share_records();
    void compare();
    void gather_counts();  // and compares them
    CallRecord gathering_counts(uint64_t* all) const;

    // A small call, whose data came with the records (one_shot.cpp).
    static constexpr size_t SLOT_BYTES = 384;  // of a rank, where a host has several
    bool fits_one_shot() const;
    size_t given_bytes(int r) const;
    uint64_t result_count() const;  // elements that this rank gets in a reduction
    void give(std::byte* payload) const;
    void finish_one_shot() const;

    // A large one (executor.cpp).
    void require_program(const CallRecord& call) const;
    void run_program();
    void exchange(const ProgramStep& step, std::span<const ProgramStep> meanwhile);
    void fill_buffers();
    void local_collective(const ProgramStep& step);

    // `ready` runs under the world's mutex; `peer` is the rank that it waits for, which may change.
    // `awaited`: the rank that sends the data itself, or takes it.
    void wait(const std::function<bool()>& ready, const int& peer, int awaited);
    void run_local(int collective, const void* source, void* target, uint64_t count, int dtype, int op, int root,
                   const uint64_t* counts);

    bool has_finished(int r) const override { return group_.finished(r, call.epoch, r == awaited_); }
    std::optional<Failure> host_failure() override;
    uint64_t deadline() const override { return deadline_of(call.start, call.timeout + (inside_host_ ? MARGIN : 0)); }
    Failure timed_out() override;

    // How parts of a reduction are combined: avg divides, and premul_sum multiplies, apart from that.
    int partial_op() const { return call.op == RC_AVG || call.op == RC_PREMUL_SUM ? int(RC_SUM) : call.op; }
    void combine(std::byte* target, const std::vector<const void*>& sources, uint64_t count) const;
    void divide(std::byte* target, uint64_t count) const;
    std::byte* at(const rc_block& block) const { return memories_[block.memory] + block.begin * call.item; }

    NetworkGroup& group_;
    const Collective& row_;
    const Blocks blocks_;
    const bool one_shot_;
    std::vector<HostRecord> records_;  // by host
    std::byte* memories_[3]{};
    bool inside_host_ = false;      // where this rank waits
    size_t window_ = 0;             // pieces at once in each direction
    int awaited_ = -1;              // the rank whose data it waits for, or that is to take its own
    std::byte* landing_ = nullptr;  // for what is combined as it arrives
};

}  // namespace ringcomm
