// How a NetworkCall reaches the agreement: before any rank writes a result, it has heard from every host which call its
// ranks make.
//
// Each host contributes a record: the signatures of its ranks (one if they agree), and the data of a small call. Every
// host gets the records of all hosts, in ceil(log2(hosts)) rounds: in round k, a host sends all records that it has to
// the host 2^k before it, and so gets those of the 2^k hosts behind it (Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997). So a small call takes one
// pass: when the agreement is reached, all data is there.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "network/call.h"

namespace ringcomm {

namespace {

// While it lives, a traced call also counts what its rank waits for others of its host.
class WaitsInHost {
public:
    explicit WaitsInHost(NetworkGroup& group) : group_(group) {
        if (counts()) group.local.group->waits = &waits_;
    }
    ~WaitsInHost() {
        if (!counts()) return;
        group_.local.group->waits = nullptr;
        if (waits_.late < 0) return;
        group_.waits->add(waits_.longest, group_.layout.ranks[group_.layout.host][waits_.late]);
        group_.waits->total += waits_.total - waits_.longest;
    }
    WaitsInHost(const WaitsInHost&) = delete;

private:
    bool counts() const { return group_.waits && group_.local.group; }

    NetworkGroup& group_;
    Waits waits_;
};

}  // namespace

// What a rank of a host with several ranks gives to the agreement, in a staging buffer of the host.
struct NetworkCall::Slot {
    Signature signature;
    std::byte payload[SLOT_BYTES];
};

// Afterwards all ranks have begun the call: what a trace calls waiting ends here.
void NetworkCall::agree() {
    const WaitsInHost waits(group_);
    const bool leads = group_.layout.local_rank == 0;
    HostRecord own = contribute();
    if (leads) exchange_records(std::move(own));
    if (group_.local.group) share_records();
    compare();
}

// Returns this host's record.
HostRecord NetworkCall::contribute() {
    if (!group_.local.group) {
        std::vector<std::byte> payload(one_shot_ ? given_bytes(rank) : 0);
        if (!payload.empty()) give(payload.data());
        return {{call.signature}, payload};
    }
    const int ranks = group_.layout.local_size();
    Slot mine{call.signature, {}};
    if (one_shot_) give(mine.payload);
    std::vector<Slot> slots(ranks);
    run_local(RC_ALL_GATHER, &mine, slots.data(), sizeof(Slot), RC_UINT8, 0, 0, nullptr);
    std::vector<Signature> signatures;
    for (const Slot& slot : slots) signatures.push_back(slot.signature);
    const bool agreed =
        std::all_of(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.signature == call.signature; });
    std::vector<std::byte> payload;
    if (agreed && one_shot_ && row_.reduces) {
        payload.resize(given_bytes(rank));
        std::vector<const void*> sources;
        for (const Slot& slot : slots) sources.push_back(slot.payload);
        combine(payload.data(), sources, payload.size() / call.item);
    } else if (agreed && one_shot_) {
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
        const int to = (me - distance + hosts) % hosts;
        for (int sent = 0; sent < number;) {  // in several packets, where each rank of many calls something else
            const std::lock_guard lock(world.mutex);
            PacketWriter packet(group_.head(PacketType::RECORDS));
            packet.add(agreement);
            packet.add(uint32_t(me + sent));
            const auto next = [&]() -> const auto& { return (*arrived)[(me + sent) % hosts]; };
            do {
                packet.add(uint64_t(next().size()));
                packet.add(Bytes(next()));
            } while (++sent < number && packet.packet().size() + sizeof(uint64_t) + next().size() <= Link::MAX_PACKET);
            world.send_packet(group_.members()[layout.ranks[to][0]], packet.packet());
        }
        int missing = -1;  // a rank
        const uint64_t begin = group_.waits ? ticks() : 0;
        wait(
            [&] {
                for (int i = 0; i < number; ++i) {
                    const int host = (me + distance + i) % hosts;
                    if ((*arrived)[host].empty()) return missing = layout.ranks[host][0], false;
                }
                return true;
            },
            missing, layout.ranks[(me + distance) % hosts][0]);
        if (group_.waits && missing >= 0) group_.waits->add(ticks() - begin, missing);
    }
    const std::lock_guard lock(world.mutex);
    for (std::vector<std::byte>& record : *arrived) records_.emplace_back(std::exchange(record, {}));
}

// The first rank of the host has the records of all hosts, and passes them on behind their lengths. Those of a small
// call take one broadcast.
void NetworkCall::share_records() {
    constexpr size_t ROOM = 1 << 10;
    const size_t hosts = group_.layout.hosts(), first = hosts * sizeof(uint64_t) + ROOM;
    std::vector<std::byte> shared;
    const auto add = [&](Bytes bytes) { shared.insert(shared.end(), bytes.begin(), bytes.end()); };
    for (const HostRecord& record : records_) add(bytes_of(uint64_t(record.bytes().size())));
    for (const HostRecord& record : records_) add(record.bytes());
    const auto broadcast = [&](size_t begin, size_t end) {
        if (shared.size() < end) shared.resize(end);
        std::byte* const data = shared.data() + begin;
        run_local(RC_BROADCAST, data, data, end - begin, RC_UINT8, 0, 0, nullptr);
    };
    broadcast(0, first);
    std::vector<uint64_t> lengths(hosts);
    memcpy(lengths.data(), shared.data(), hosts * sizeof(uint64_t));
    const size_t end = std::accumulate(lengths.begin(), lengths.end(), hosts * sizeof(uint64_t));
    if (end > first) broadcast(first, end);
    if (!records_.empty()) return;
    auto at = shared.begin() + hosts * sizeof(uint64_t);
    for (const uint64_t length : lengths) {
        records_.emplace_back(std::vector(at, at + length));
        at += length;
    }
}

void NetworkCall::compare() {
    std::vector<Signature> by_rank(size, call.signature);
    for (int host = 0; host < group_.layout.hosts(); ++host) {
        const std::vector<Signature> signatures = records_[host].signatures();
        const std::vector<int>& ranks = group_.layout.ranks[host];
        for (size_t i = 0; i < ranks.size(); ++i) by_rank[ranks[i]] = signatures[std::min(i, signatures.size() - 1)];
    }
    const auto other =
        std::find_if(by_rank.rbegin(), by_rank.rend(), [&](const auto& each) { return each != call.signature; });
    if (other == by_rank.rend()) return;
    const int last = int(by_rank.rend() - other) - 1;
    throw mismatch(call.epoch, last, [&](int r) -> const Signature& { return by_rank[r]; });
}

CallRecord NetworkCall::gathering_counts(uint64_t* all) const {
    CallRecord gather = call;  // the same call to the other ranks
    gather.collective = RC_ALL_GATHER;
    gather.source = reinterpret_cast<const std::byte*>(call.counts);
    gather.target = reinterpret_cast<std::byte*>(all);
    gather.count = 2 * size;
    gather.dtype = RC_UINT64;
    gather.item = sizeof(uint64_t);
    gather.root = 0;
    gather.counts = nullptr;
    return gather;
}

// An all_to_all with counts: what one rank sends, another must expect.
void NetworkCall::gather_counts() {
    std::vector<uint64_t> all(2 * size * size);
    const CallRecord gather = gathering_counts(all.data());
    NetworkCall(group_, gather).run();
    compare_counts([&](int r) { return &all[2 * size * r]; });
}

}  // namespace ringcomm
