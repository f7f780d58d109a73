// One collective in flight on this rank, whatever connects the ranks: what ends its waits, and what its failures say.
#pragma once

#include <functional>

#include "core/peer_group.h"

namespace ringcomm {

// Names the call in a failure that names none.
void name_call(Failure& failure, const CallRecord& call);

class RunningCollective : public WaitChecks {
public:
    RunningCollective(PeerGroup& group, const CallRecord& call)
        : rank(group.rank), size(group.size), call(call), peers_(group) {}

    const int rank, size;
    const CallRecord& call;

    // Records the path of the call, for rc_last_path().
    void set_path(rc_path path, uint64_t number = 1) const {
        peers_.last_path.store(number * RC_PATHS + path, std::memory_order_relaxed);
    }

protected:
    ~RunningCollective() = default;

    // A rank that has finished this call may leave.
    virtual bool has_finished(int r) const = 0;
    // A failure among the ranks of this host that the others have not reported yet.
    virtual std::optional<Failure> host_failure() { return {}; }
    virtual Failure timed_out() = 0;

    std::optional<Failure> stop_reason() override;
    std::optional<Failure> lost_reason();  // stop_reason() without the deadline
    [[noreturn]] void fail(const Failure& failure) override;
    void on_spin_expired() override { peers_.on_spin_expired(); }
    bool yield() override { return peers_.yield(); }
    uint64_t deadline() const override { return deadline_of(call.start, call.timeout); }

    std::string describe_call() const { return describe(call.signature); }
    // `late`: the ranks that the call waits for; the first is to blame, or `otherwise` if there is none.
    Failure timeout(const std::string& why, const std::vector<int>& late, int otherwise) const;

    using Signatures = std::function<const Signature&(int rank)>;
    // The ranks have called different things at `epoch`; `other` is one that differs from this rank.
    Failure mismatch(uint64_t epoch, int other, const Signatures& signatures) const;
    // counts(r): of an all_to_all on rank r, what it sends to each rank, then what it expects. Throws a mismatch.
    template <class Counts>
    void compare_counts(Counts counts) const {
        bool differ = false;
        for (int p = 0; p < size; ++p) {
            for (int q = 0; q < size; ++q) differ |= counts(p)[q] != counts(q)[size + p];
        }
        if (differ) throw counts_mismatch(counts);
    }

private:
    Failure counts_mismatch(const std::function<const uint64_t*(int rank)>& counts) const;

    PeerGroup& peers_;
};

}  // namespace ringcomm
