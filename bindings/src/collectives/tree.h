// Small collectives of many ranks through a tree. Every rank reads n - 1 start records on the path one-shot, so that n
// (n - 1) cache lines move in a call; through the tree some 3 n do, and O(log n) one after another.
//
// A rank with children waits until all have started the call, and relays what the ranks of its subtree give to its
// parent. The root has everything then, makes the result, and relays it down. So it is the result of the path one-shot,
// bit by bit.
//
// The tree is a shortcut that no rank depends on: every rank has published its start record, and what it gives, as
// for one-shot. A rank whose turn in the tree does not come in time (rc_tuning.tree_wait_ns), because another one
// computes, is late, or calls something else, reads the records of all, and finishes or fails by them. Then so do the
// ranks that would have waited for it.
#pragma once

#include <optional>

#include "collectives/collective_op.h"

namespace ringcomm {

class TreePass {
public:
    // Each rank gives so many bytes, and gets `result_bytes`.
    TreePass(CollectiveOp& op, size_t given, size_t result_bytes)
        : op_(op), given_(given), result_bytes_(result_bytes) {}

    // Whether blocks of all ranks fit the tree, and no chunk is larger.
    static bool fits(ShmGroup& group, const CallRecord& call);
    // Does the rest of a call whose start record is published. combine(sources, result): of the data of all ranks, on
    // the root. Returns false if one-shot has to do it; then no output was written.
    template <class Combine>
    bool run(Combine combine) {
        if (!op_.group.tree() || !is_worth_it()) return false;
        const RankTree& tree = *op_.group.tree();
        bool done = collect();
        if (done && tree.parent(op_.rank) < 0) {
            combine(op_.group.sources.data(), result_of(op_.rank));
            relay_result(result_of(op_.rank));
        } else if (done) {
            done = take_result();
        }
        op_.group.tree_attempts.end(done);
        if (!done) return false;
        op_.group.verified = op_.call.epoch;
        op_.set_path(RC_PATH_TREE);
        return true;
    }

private:
    bool is_worth_it() const;
    // Up: waits for the children, and relays the data of the subtree.
    bool collect();
    // Down: waits for the parent, and relays the result.
    bool take_result();
    void relay_result(const std::byte* result);
    Relay& up(int r) const { return op_.group.header(r).up[op_.call.epoch & 1]; }
    Relay& down(int r) const { return op_.group.header(r).down[op_.call.epoch & 1]; }
    // What rank r relays: in its relay if that has room, else in a staging buffer that no chunk 0 uses.
    std::byte* data_of(int r) const;
    std::byte* result_of(int r) const;
    size_t room() const { return op_.group.arena().layout.staging_bytes / 2; }
    // Wait for rank r, all together for tree_wait_ns.
    bool arrives(int r, const Relay& relay);
    bool starts(int child);
    template <class Ready>
    bool soon(int r, Ready ready);

    CollectiveOp& op_;
    const size_t given_, result_bytes_;
    std::optional<WaitClock> waiting_;
};

}  // namespace ringcomm
