// NetworkCall: the agreement, waiting and failing.
#include "network/call.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

constexpr uint64_t SPIN_NS = 200'000, SPIN_OVERSUBSCRIBED_NS = 20'000;  // a sleeping rank takes some 50 us to wake
constexpr uint64_t SOON_NS = 10'000;       // a message over TCP takes some 5 us; then others may need the core
constexpr uint64_t SLICE_NS = 50'000'000;  // between checks of failures, signals and the deadline
constexpr double GRACE =
    1.0;  // seconds more for waits inside a host: its ranks may wait for another host, and know why

}  // namespace

// What a rank of a host with several ranks gives to the agreement, in a staging buffer of the host.
struct NetworkCall::Slot {
    Signature signature;
    std::byte payload[SLOT_BYTES];
};

NetworkCall::NetworkCall(NetworkGroup& group, const CallRecord& call)
    : group_(group),
      call_(call),
      // An internal collective gathers facts.
      row_(collectives[call.collective == RC_SPLIT || call.collective == RC_EMPTY ? RC_ALL_GATHER : call.collective]),
      blocks_(call),
      one_pass_(!call.on_gpus && fits_one_pass()) {}

bool NetworkCall::lacks_program() const {
    if (one_pass_) return false;
    const bool counted = row_.exchanges() && call_.counts;
    return !group_.programs.find(key_of(call_, group_.size)) ||
           (counted && NetworkCall(group_, gathering_counts(nullptr)).lacks_program());
}

void NetworkCall::run() {
    agree();
    if (call_.on_gpus) return;
    if (row_.exchanges() && call_.counts) compare_counts();
    if (one_pass_) {
        finish_one_pass();
    } else {
        run_program();
    }
}

// --- Agreement -------------------------------------------------------------------------------------------------------

void NetworkCall::agree() {
    const bool leads = group_.layout.local_rank == 0;
    HostRecord own = contribute();
    if (leads) exchange_records(std::move(own));
    if (group_.local.comm) share_records();
    compare();
}

// Returns this host's record.
HostRecord NetworkCall::contribute() {
    if (!group_.local.comm) {
        std::vector<std::byte> payload(one_pass_ ? given_bytes(group_.rank) : 0);
        if (!payload.empty()) give(payload.data());
        return {{call_.signature}, payload};
    }
    const int ranks = group_.layout.local_size();
    Slot mine{call_.signature, {}};
    if (one_pass_) give(mine.payload);
    std::vector<Slot> slots(ranks);
    run_local(RC_ALL_GATHER, &mine, slots.data(), sizeof(Slot), RC_UINT8, 0, 0, nullptr);
    std::vector<Signature> signatures;
    for (const Slot& slot : slots) signatures.push_back(slot.signature);
    const bool agreed =
        std::all_of(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.signature == call_.signature; });
    std::vector<std::byte> payload;
    if (agreed && one_pass_ && row_.reduces) {
        payload.resize(given_bytes(group_.rank));
        std::vector<const void*> sources;
        for (const Slot& slot : slots) sources.push_back(slot.payload);
        combine(payload.data(), sources, payload.size() / call_.item);
    } else if (agreed && one_pass_) {
        for (int i = 0; i < ranks; ++i) {
            const std::byte* given = slots[i].payload;
            payload.insert(payload.end(), given, given + given_bytes(group_.layout.ranks[group_.layout.host][i]));
        }
    }
    return {signatures, payload};
}

void NetworkCall::exchange_records(HostRecord own) {
    const HostLayout& layout = group_.layout;
    const int hosts = layout.hosts(), me = layout.host;
    NetworkWorld& world = *group_.world;
    const uint64_t agreement = group_.next_agreement();
    std::vector<std::vector<std::byte>>* arrived;
    {
        const std::lock_guard lock(world.mutex);
        arrived = &group_.records(agreement);
        (*arrived)[me] = own.bytes();
    }
    for (int distance = 1; distance < hosts; distance *= 2) {
        const int number = std::min(distance, hosts - distance);
        {
            const std::lock_guard lock(world.mutex);
            PacketWriter packet(group_.head(PacketType::RECORDS));
            packet.add(agreement);
            packet.add(uint32_t(me));
            packet.add(uint32_t(number));
            for (int i = 0; i < number; ++i) {
                const std::vector<std::byte>& record = (*arrived)[(me + i) % hosts];
                packet.add(uint64_t(record.size()));
                packet.add(Bytes(record));
            }
            const int to = (me - distance + hosts) % hosts;
            world.send_packet(group_.members()[layout.ranks[to][0]], packet.packet());
        }
        wait([&] {
            for (int i = 0; i < number; ++i) {
                if ((*arrived)[(me + distance + i) % hosts].empty()) return false;
            }
            return true;
        });
    }
    const std::lock_guard lock(world.mutex);
    for (std::vector<std::byte>& record : *arrived) records_.emplace_back(std::exchange(record, {}));
}

// The first rank of the host has the records of all hosts, and passes them on. Where all ranks agree, which is told by
// a byte before them, all know how long the records are.
void NetworkCall::share_records() {
    const bool leads = group_.layout.local_rank == 0;
    std::vector<uint64_t> lengths(group_.layout.hosts());
    const auto tell = [&](void* data, size_t bytes) {
        run_local(RC_BROADCAST, data, data, bytes, RC_UINT8, 0, 0, nullptr);
    };
    if (leads) {
        for (size_t host = 0; host < lengths.size(); ++host) lengths[host] = records_[host].bytes().size();
    }
    tell(lengths.data(), lengths.size() * sizeof(uint64_t));
    const uint64_t all = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
    std::vector<std::byte> joined;
    if (leads) {
        for (const HostRecord& record : records_)
            joined.insert(joined.end(), record.bytes().begin(), record.bytes().end());
    }
    joined.resize(all);
    tell(joined.data(), all);
    if (leads) return;
    auto at = joined.begin();
    for (const uint64_t length : lengths) {
        records_.emplace_back(std::vector(at, at + length));
        at += length;
    }
}

void NetworkCall::compare() {
    std::vector<Signature> by_rank(group_.size, call_.signature);
    for (int host = 0; host < group_.layout.hosts(); ++host) {
        const std::vector<Signature> signatures = records_[host].signatures();
        const std::vector<int>& ranks = group_.layout.ranks[host];
        for (size_t i = 0; i < ranks.size(); ++i) by_rank[ranks[i]] = signatures[std::min(i, signatures.size() - 1)];
    }
    const auto other =
        std::find_if(by_rank.rbegin(), by_rank.rend(), [&](const auto& each) { return each != call_.signature; });
    if (other == by_rank.rend()) return;
    MessageLines lines(format("the ranks called different things at epoch %" PRIu64 ":", call_.epoch));
    for (int r = 0; r < group_.size; ++r) {
        lines.add(format("  rank %d: ", r) + describe_beside(by_rank[r], by_rank[0]));
    }
    throw Failure(RC_MISMATCH, lines.text(), int(by_rank.rend() - other) - 1, describe_call(), describe(*other));
}

CallRecord NetworkCall::gathering_counts(uint64_t* all) const {
    CallRecord gather = call_;  // the same call to the other ranks
    gather.collective = RC_ALL_GATHER;
    gather.source = reinterpret_cast<const std::byte*>(call_.counts);
    gather.target = reinterpret_cast<std::byte*>(all);
    gather.count = 2 * group_.size;
    gather.dtype = RC_UINT64;
    gather.item = sizeof(uint64_t);
    gather.root = 0;
    gather.counts = nullptr;
    return gather;
}

// An all_to_all with counts: what one rank sends, another must expect.
void NetworkCall::compare_counts() {
    const int n = group_.size;
    std::vector<uint64_t> all(2 * n * n);
    const CallRecord gather = gathering_counts(all.data());
    NetworkCall(group_, gather).run();
    int other = -1;
    MessageLines lines(format("the ranks called different things at epoch %" PRIu64 ":", call_.epoch));
    for (int p = 0; p < n; ++p) {
        for (int q = 0; q < n; ++q) {
            const uint64_t sent = all[2 * n * p + q], expected = all[2 * n * q + n + p];
            if (sent == expected) continue;
            if (other < 0 || p == group_.rank || q == group_.rank) other = p == group_.rank ? q : p;
            lines.add(format("  rank %d sends %" PRIu64 " elements to rank %d, which expects %" PRIu64, p, sent, q,
                             expected));
        }
    }
    if (other >= 0) throw Failure(RC_MISMATCH, lines.text(), other, describe_call(), describe_call());
}

// --- Waiting ---------------------------------------------------------------------------------------------------------

double NetworkCall::seconds_left() const {
    const uint64_t now = now_ns();
    return deadline() > now ? double(deadline() - now) * 1e-9 : 0;
}

// Spins as long as data moves, then sleeps on the link.
void NetworkCall::wait(const std::function<bool()>& ready) {
    NetworkWorld& world = *group_.world;
    const uint64_t patience = group_.tuning().oversubscribed ? SPIN_OVERSUBSCRIBED_NS : SPIN_NS;
    const auto ready_now = [&](bool& moved) {
        const std::lock_guard lock(world.mutex);
        if (ready()) return true;
        moved = world.progress();
        return ready();
    };
    uint64_t idle_since = now_ns(), checked = idle_since;
    for (;;) {
        bool moved = false;
        if (ready_now(moved)) return;
        const uint64_t now = now_ns();
        if (moved) idle_since = now;
        const bool sleeps = now - idle_since >= patience;
        if (sleeps) {
            const uint32_t ticket = world.announce();
            const bool already = ready_now(moved);
            if (!already) world.sleep(ticket, std::min(slice_ns(deadline()), SLICE_NS));
            world.retract();
            if (already || ready_now(moved)) return;
        } else if (group_.tuning().oversubscribed || now - idle_since > SOON_NS) {
            yield_core();
        }
        if (!sleeps && now - checked < SLICE_NS) continue;
        checked = now;
        if (const auto failure = stop_reason()) {
            if (ready_now(moved)) return;
            fail(*failure);
        }
    }
}

// A collective of the ranks of this host. Its failure is one of the group.
void NetworkCall::run_local(int collective, const void* source, void* target, uint64_t count, int dtype, int op,
                            int root, const uint64_t* counts) {
    CallRecord call{collective,
                    static_cast<const std::byte*>(source),
                    static_cast<std::byte*>(target),
                    count,
                    dtype,
                    op,
                    1.0,
                    root,
                    counts,
                    seconds_left() + GRACE,
                    dtype_bytes(dtype)};
    try {
        const PeerGroup::EnclosedWait enclosed(group_, call_name(call_.collective));
        group_.local.collectives->run(call);
    } catch (const Failure& failure) {
        if (failure.error.code == RC_INTERRUPTED) throw failure;
        const bool late = failure.error.code == RC_TIMEOUT && failure.error.group_size == 0;
        fail(late ? timed_out() : group_.from_host(failure, describe_call()));
    }
}

std::optional<Failure> NetworkCall::stop_reason() {
    if (auto failure = group_.stop_reason(call_name(call_.collective))) return failure;
    try {  // a rank of this host may have heard first
        if (group_.local.comm) group_.local.comm->check_failure();
    } catch (const Failure& failure) {
        return group_.from_host(failure, describe_call());
    }
    for (int p = 0; p < group_.size; ++p) {
        if (p == group_.rank || group_.finished(p, call_.epoch)) continue;
        if (auto failure = group_.peer_failure(p, describe_call())) return failure;
    }
    if (now_ns() >= deadline()) return timed_out();
    return {};
}

void NetworkCall::fail(const Failure& failure) {
    Failure annotated(failure);
    if (annotated.error.collective < 0) annotated.error.collective = call_.collective;
    if (annotated.error.epoch == 0) annotated.error.epoch = call_.epoch;
    group_.fail(annotated);
}

Failure NetworkCall::timed_out() {
    const auto statuses = group_.query(1);
    std::vector<int> late;
    std::string names;
    for (int r = 0; r < group_.size; ++r) {
        if (r == group_.rank || (statuses[r] && statuses[r]->begun >= call_.epoch)) continue;
        late.push_back(r);
        names += format("%s%d", names.empty() ? "" : ", ", r);
    }
    const std::string why = late.empty() ? "no rank made progress" : "it was not called by rank " + names;
    MessageLines lines(format("rank %d waited %.3g s in ", group_.rank, call_.timeout) + describe_call() +
                       format(" (epoch %" PRIu64 "): ", call_.epoch) + why);
    for (int r = 0; r < group_.size; ++r) {
        lines.add(format("rank %d: ", r) + (statuses[r] ? statuses[r]->calls : "no answer"));
    }
    return Failure(RC_TIMEOUT, lines.text(), late.empty() ? group_.rank : late[0]);
}

void NetworkCall::combine(std::byte* target, const std::vector<const void*>& sources, uint64_t count) const {
    if (count) kernels().reduce[call_.dtype][partial_op()](target, sources.data(), int(sources.size()), count, 1.0);
}

// The sum of all ranks becomes their average.
void NetworkCall::divide(std::byte* target, uint64_t count) const {
    const void* sum = target;
    if (count) kernels().reduce[call_.dtype][RC_AVG](target, &sum, 1, count, group_.size);
}

}  // namespace ringcomm
