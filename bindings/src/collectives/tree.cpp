// TreePass: the ways up and down.
#include "collectives/tree.h"

#include <algorithm>
#include <cstring>

#include "collectives/path.h"

namespace ringcomm {

// All ranks have read what was relayed two calls ago, because they have started the last one.
bool TreePass::is_worth_it() const {
    ShmGroup& group = op_.group;
    return op_.part == Part::WHOLE && group.verified + 1 == op_.call.epoch && given_ * op_.size <= room() &&
           result_bytes_ <= room() && !may_be_direct(group.tuning(), given_) &&
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
        if (is_leaf ? !starts(child) : !arrives(up(child))) return false;
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
    if (!arrives(down(parent))) return false;
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
    if (bytes <= RELAY_BYTES) return up(r).payload;
    return op_.group.arena().staging(r, (op_.call.epoch & 1) * 2 + 1);
}

std::byte* TreePass::result_of(int r) const {
    if (result_bytes_ <= RELAY_BYTES) return down(r).payload;
    return op_.group.arena().staging(r, (op_.call.epoch & 1) * 2 + 1) + room();
}

bool TreePass::arrives(const Relay& relay) const {
    return soon([&] { return observe(relay.epoch) == op_.call.epoch; }) && relay.signature == op_.call.signature;
}

bool TreePass::starts(int child) const {
    const StartRecord& record = op_.record(child);
    return soon([&] { return observe(record.epoch) == op_.call.epoch; }) && record.signature == op_.call.signature;
}

template <class Ready>
bool TreePass::soon(Ready ready) const {
    constexpr int POLLS = 8;
    const auto poll = [&] {
        for (int i = 0; i < POLLS; ++i) {
            if (ready()) return true;
            cpu_relax();
        }
        return false;
    };
    if (poll()) return true;
    about_to_wait();
    WaitClock waiting(YIELD_NS);
    while (waiting.waited() < op_.group.tuning().tree_wait_ns) {
        if (poll()) return true;
        if (op_.group.tuning().oversubscribed) yield_core();
    }
    return false;
}

}  // namespace ringcomm
