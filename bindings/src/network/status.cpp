// What the ranks of a NetworkGroup do: each rank answers for itself, or another one of its host.
#include <algorithm>
#include <array>
#include <utility>

#include "network/group.h"

namespace ringcomm {

namespace {

constexpr uint64_t ANSWER_NS = 500'000'000;        // for the ranks that a timeout or a report asks
constexpr uint64_t FIRST_ANSWER_NS = 100'000'000;  // of those asked first
constexpr uint64_t FRESH_NS = 1'000'000'000;       // a report of all ranks asks once
constexpr int MOST_CALLS = 500;                    // in the packet of a rank

}  // namespace

std::vector<std::optional<NetworkGroup::Status>> NetworkGroup::query(int calls) const {
    const auto answered = [&] {
        for (int r = 0; r < size; ++r) {
            if (!statuses_[r] && may_answer(r)) return false;
        }
        return true;
    };
    std::unique_lock lock(world->mutex);
    const auto before = std::exchange(statuses_, std::vector<std::optional<Status>>(size));
    const bool recent = now_ns() - asked_ < FRESH_NS;
    for (int here = 0; here < layout.local_size(); ++here) {
        statuses_[layout.ranks[layout.host][here]] = status_here(here, calls);
    }
    PacketWriter packet(head(PacketType::QUERY));
    packet.add(uint32_t(calls));
    ask_hosts(packet.packet());
    const uint64_t begin = now_ns();
    bool asks_again = true;
    while (!answered() && now_ns() < begin + ANSWER_NS) {
        if (asks_again && now_ns() >= begin + FIRST_ANSWER_NS) {
            ask_again(packet.packet());
            asks_again = false;
        }
        if (world->progress()) continue;
        const uint32_t ticket = world->announce();
        lock.unlock();
        world->sleep(ticket, 1'000'000);
        world->retract();
        lock.lock();
    }
    for (int r = 0; r < size && recent; ++r) {
        if (!statuses_[r]) statuses_[r] = before[r];  // it may have left its call meanwhile
    }
    asked_ = now_ns();
    asked_calls_ = calls;
    return statuses_;
}

// A rank of each other host: one that is connected, if there is one.
void NetworkGroup::ask_hosts(Bytes query) const {
    for (int host = 0; host < layout.hosts(); ++host) {
        if (host == layout.host) continue;
        std::vector<int> ranks = layout.ranks[host];
        std::erase_if(ranks, [&](int r) { return !may_answer(r); });
        if (ranks.empty()) continue;
        const auto connected = [&](int r) { return world->link->connected(members_[r]); };
        const auto found = std::find_if(ranks.begin(), ranks.end(), connected);
        const int asked = found != ranks.end() ? *found : ranks[layout.local_rank % ranks.size()];
        world->send_packet(members_[asked], query);
    }
}

// A rank answers only while it is in a call: all ranks of the hosts that have not answered.
void NetworkGroup::ask_again(Bytes query) const {
    for (int r = 0; r < size; ++r) {
        if (!statuses_[r] && may_answer(r)) world->send_packet(members_[r], query);
    }
}

// What the ranks of this host do is in its memory, of this rank at least.
NetworkGroup::Status NetworkGroup::status_here(int local_rank, int calls) const {
    const FlightRecord& record =
        local_rank == layout.local_rank ? flight : local.group->arena().between_hosts(local_rank).record;
    RankReport report{layout.ranks[layout.host][local_rank], "", record.waits_for.load() - 1,
                      record.last(std::min(calls, MOST_CALLS))};
    if (!local.group) return {record.epoch.load(), true, report};
    // It may wait for a rank of its host, in a collective by which it does its part there.
    const int here = local.group->arena().rank(local_rank).flight.waits_for.load() - 1;
    if (report.waits_for < 0 && here >= 0 && here < layout.local_size()) {
        report.waits_for = layout.ranks[layout.host][here];
    }
    report.state = local.group->state(local_rank);
    return {record.epoch.load(), local.group->runs(local_rank), report};
}

RankReport NetworkGroup::report(int r, int calls) const {
    // Of this host as it is now; of others by answers that may be FRESH_NS old.
    if (const int here = here_[r]; here >= 0) {
        const std::lock_guard lock(world->mutex);
        return status_here(here, calls).report;
    }
    const auto statuses = [&] {
        std::unique_lock lock(world->mutex);
        if (now_ns() - asked_ < FRESH_NS && asked_calls_ >= calls) return statuses_;
        lock.unlock();
        return query(calls);
    }();
    if (statuses[r]) return statuses[r]->report;
    return {r, closed(r) ? "closed" : "no answer", -1, {}, false};
}

void NetworkGroup::answer_query(int source, PacketReader& packet) {
    const int calls = int(packet.next<uint32_t>());
    for (int here = 0; here < layout.local_size(); ++here) {
        const Status status = status_here(here, calls);
        PacketWriter answer(head(PacketType::STATUS));
        answer.add(uint32_t(layout.ranks[layout.host][here]));
        answer.add(status.begun);
        answer.add(uint32_t(status.runs));
        answer.add(std::array{status.report.waits_for, int(status.report.calls.size())});
        answer.add(std::as_bytes(std::span(status.report.calls)));
        answer.add(std::as_bytes(std::span(status.report.state)));
        world->send_packet(members_[source], answer.packet());
    }
}

void NetworkGroup::answer_arrived(PacketReader& packet) {
    const auto r = packet.next<uint32_t>();
    const auto begun = packet.next<uint64_t>();
    const bool runs = packet.next<uint32_t>();
    const auto [waits_for, calls] = packet.next<std::array<int, 2>>();
    RankReport report{int(r), "", waits_for, {}};
    while (int(report.calls.size()) < calls && packet.complete()) report.calls.push_back(packet.next<ReportedCall>());
    const Bytes state = packet.rest();
    report.state = {reinterpret_cast<const char*>(state.data()), state.size()};
    if (r < uint32_t(size)) statuses_[r] = {begun, runs, std::move(report)};
}

}  // namespace ringcomm
