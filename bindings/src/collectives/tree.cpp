// TreePass: the ways up and down.
#include "collectives/tree.h"

#include <algorithm>
#include <cstring>

#include "collectives/path.h"

namespace ringcomm {

// After a one-way call some ranks have not compared its records, and would not come. After another one all have read
// what was relayed two calls ago, because they have started the last one.
bool TreePass::is_worth_it() const {
    ShmGroup& group = op_.group;
    const uint64_t last = op_.call.epoch - 1;
    return op_.part == Part::WHOLE && group.verified == last && group.last_one_way != last &&
           given_ * op_.size <= room() && result_bytes_ <= room() && !may_be_direct(group.tuning(), given_) &&
           group.tree_attempts.is_due(op_.call.epoch);
}

bool TreePass::fits(ShmGroup& group, const CallRecord& call) {
    const size_t most = std::min<size_t>(group.tuning().segment_bytes, group.arena().layout.staging_bytes / 2);
    return group.tree() && !call.counts && group.size * call.bytes() <= most &&
           !may_be_direct(group.tuning(), call.bytes());
}

bool TreePass::collect() {
    const RankTree& tree = *op_.group.tree();
    const bool is_root = tree.parent(op_.rank) < 0;
    const void** const sources = op_.group.sources.data();
    sources[op_.rank] = op_.call.source;
    if (tree.children(op_.rank).empty()) return true;
    std::byte* data = is_root ? nullptr : data_of(op_.rank);
    const auto relay = [&](const std::byte* from, size_t bytes) {
        if (bytes) memcpy(data, from, bytes);
        data += bytes;
    };
    if (!is_root) relay(op_.call.source, given_);
    for (const int child : tree.children(op_.rank)) {
        const std::vector<int>& subtree = tree.subtree(child);
        const bool is_leaf = subtree.size() == 1;
        if (is_leaf ? !starts(child) : !arrives(child, up(child))) return false;
        const std::byte* const theirs = is_leaf ? op_.staging(child, 0, given_) : data_of(child);
        for (size_t i = 0; i < subtree.size(); ++i) sources[subtree[i]] = theirs + i * given_;
        if (!is_root) relay(theirs, subtree.size() * given_);
    }
    if (is_root) return true;
    up(op_.rank).signature = op_.call.signature;
    publish<SITE_RELAY>(up(op_.rank).epoch, op_.call.epoch);
    return true;
}

bool TreePass::take_result() {
    const int parent = op_.group.tree()->parent(op_.rank);
    if (!arrives(parent, down(parent))) return false;
    const std::byte* const result = result_of(parent);
    if (!op_.group.tree()->children(op_.rank).empty()) {
        if (result_bytes_) memcpy(result_of(op_.rank), result, result_bytes_);
        relay_result(result);
    } else if (result_bytes_) {
        memcpy(op_.call.target, result, result_bytes_);
    }
    return true;
}

void TreePass::relay_result(const std::byte* result) {
    down(op_.rank).signature = op_.call.signature;
    publish<SITE_RELAY>(down(op_.rank).epoch, op_.call.epoch);
    if (result_bytes_) memcpy(op_.call.target, result, result_bytes_);
}

std::byte* TreePass::data_of(int r) const {
    const size_t bytes = op_.group.tree()->subtree(r).size() * given_;
    return bytes <= RELAY_BYTES ? up(r).payload : op_.staging(r, 1, bytes);
}

std::byte* TreePass::result_of(int r) const {
    return result_bytes_ <= RELAY_BYTES ? down(r).payload : op_.staging(r, 1, result_bytes_) + room();
}

bool TreePass::arrives(int r, const Relay& relay) {
    return soon(r, [&] { return observe(relay.epoch) == op_.call.epoch; }) && relay.signature == op_.call.signature;
}

bool TreePass::starts(int child) {
    const StartRecord& record = op_.record(child);
    return soon(child, [&] { return observe(record.epoch) == op_.call.epoch; }) &&
           record.signature == op_.call.signature;
}

// One-shot, which follows, checks for failures and for the deadline.
template <class Ready>
bool TreePass::soon(int r, Ready ready) {
    constexpr uint64_t MOST_NS = 100'000'000;
    if (poll_some(ready)) return true;
    about_to_wait();
    const rc_tuning& tuning = op_.group.tuning();
    if (!waiting_) waiting_.emplace(tuning.oversubscribed ? YIELD_NS : POLLS_NS);
    Waits* const waits = op_.group.waits;
    const uint64_t begin = waits ? ticks() : 0;
    bool is_ready = false;
    while (!is_ready && waiting_->waited() < tuning.tree_wait_ns && waiting_->passed() < MOST_NS) {
        if (tuning.oversubscribed) yield_core();
        is_ready = poll_some(ready);
    }
    if (waits) waits->add(ticks() - begin, r);
    return is_ready;
}

}  // namespace ringcomm
