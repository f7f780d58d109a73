// RunningCollective: its end by a failure, and the texts of a timeout and a mismatch.
#include "core/running_collective.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

namespace ringcomm {

namespace {

std::string mismatch_heading(uint64_t epoch) {
    return format("the ranks called different things at epoch %" PRIu64 ":", epoch);
}

}  // namespace

void name_call(Failure& failure, const CallRecord& call) {
    if (failure.error.collective < 0) failure.error.collective = call_of(call.signature.word);
    if (failure.error.epoch == 0) failure.error.epoch = call.epoch;
}

std::optional<Failure> RunningCollective::stop_reason() {
    if (auto failure = lost_reason()) return failure;
    if (now_ns() >= deadline()) return timed_out();
    return {};
}

std::optional<Failure> RunningCollective::lost_reason() {
    if (auto failure = peers_.stop_reason(call_name(call.collective))) return failure;
    if (auto failure = host_failure()) return failure;
    const std::string what = describe_call();
    for (int p = 0; p < size; ++p) {
        // In this order, because a rank finishes before it leaves.
        auto failure = p == rank ? std::nullopt : peers_.peer_failure(p, what);
        if (failure && !has_finished(p)) return failure;
    }
    return {};
}

void RunningCollective::fail(const Failure& failure) {
    Failure named(failure);
    name_call(named, call);
    peers_.fail(named);
}

Failure RunningCollective::timeout(const std::string& why, const std::vector<int>& late, int otherwise) const {
    const std::string message = format("rank %d waited %.3g s in ", rank, call.timeout) + describe_call() +
                                format(" (epoch %" PRIu64 "): ", call.epoch) + why;
    return Failure(RC_TIMEOUT, peers_.with_report(message, late), late.empty() ? otherwise : late[0]);
}

Failure RunningCollective::mismatch(uint64_t epoch, int other, const Signatures& signatures) const {
    std::vector<std::pair<Signature, std::vector<int>>> calls;  // and the ranks that made each
    for (int p = 0; p < size; ++p) {
        const auto same =
            std::find_if(calls.begin(), calls.end(), [&](const auto& each) { return each.first == signatures(p); });
        (same == calls.end() ? calls.emplace_back(signatures(p), std::vector<int>()) : *same).second.push_back(p);
    }
    MessageLines lines(mismatch_heading(epoch));
    for (const auto& [signature, ranks] : calls) {
        lines.add("  " + name_ranks(ranks) + ": " + describe_beside(signature, signatures(0)));
    }
    const Signature &own = signatures(rank), &theirs = signatures(other);
    Failure failure(RC_MISMATCH, lines.text(), other, describe(own), describe(theirs));
    failure.error.collective = call_of(own.word);
    failure.error.epoch = epoch;
    return failure;
}

Failure RunningCollective::counts_mismatch(const std::function<const uint64_t*(int rank)>& counts) const {
    int other = -1;
    MessageLines lines(mismatch_heading(call.epoch));
    for (int p = 0; p < size; ++p) {
        for (int q = 0; q < size; ++q) {
            const uint64_t sent = counts(p)[q], expected = counts(q)[size + p];
            if (sent == expected) continue;
            if (other < 0 || p == rank || q == rank) other = p == rank ? q : p;
            lines.add(format("  rank %d sends %" PRIu64 " elements to rank %d, which expects %" PRIu64, p, sent, q,
                             expected));
        }
    }
    return Failure(RC_MISMATCH, lines.text(), other, describe_call(), describe_call());
}

}  // namespace ringcomm
