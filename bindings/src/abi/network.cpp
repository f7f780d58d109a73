// The C ABI of networks and their communicators.
#include <algorithm>
#include <cinttypes>

#include "abi/network.h"
#include "core/collectives.h"

using namespace ringcomm;

namespace {

HostLayout layout_of(int rank, int size, const int* hosts) {
    std::vector<int> numbers;
    for (int r = 0; r < size; ++r) {
        if (std::find(numbers.begin(), numbers.end(), hosts[r]) == numbers.end()) numbers.push_back(hosts[r]);
    }
    HostLayout layout;
    for (const int number : numbers) {
        std::vector<int>& ranks = layout.ranks.emplace_back();
        for (int r = 0; r < size; ++r) {
            if (hosts[r] != number) continue;
            if (r == rank) {
                layout.host = int(layout.ranks.size()) - 1;
                layout.local_rank = int(ranks.size());
            }
            ranks.push_back(r);
        }
    }
    return layout;
}

LocalRanks local_ranks(rc_comm* local, const HostLayout& layout, int group_size, const Link& link) {
    const auto check_size = [&](int size) {
        if (size != layout.local_size()) rejectf("local: expected the %d ranks of this host", layout.local_size());
    };
    if (!local) {
        check_size(1);
        return {{}, nullptr, nullptr, std::make_shared<FlightRecord>()};
    }
    const EntryGuard entry(*local->handle);
    auto* const group = dynamic_cast<ShmGroup*>(&entry.group());
    if (!group) reject("local: expected a communicator in shared memory");
    entry->p2p.give_up_channels();
    check_size(group->size);
    if (group->rank != layout.local_rank) rejectf("local: expected rank %d, got %d", layout.local_rank, group->rank);
    const auto& state = local->handle->state;
    std::shared_ptr<FlightRecord> flight(state, &group->open_between_hosts(group_size, link.rank, link.size));
    if (layout.largest() == 1) return {{}, nullptr, nullptr, flight};
    return {state, group, &entry->collectives, flight};
}

}  // namespace

int rc_network_fail(rc_network* network, const char* what_this_rank_cannot) {
    return guarded([&] {
        check_pointer("network", network);
        check_pointer("what_this_rank_cannot", what_this_rank_cannot);
        const std::lock_guard lock(network->world->mutex);
        network->world->fail(what_this_rank_cannot);
    });
}

int rc_network_flush(rc_network* network) {
    return guarded([&] {
        check_pointer("network", network);
        if (network->generation != fork_generation.load()) return;
        network->world->flush();
        const std::lock_guard lock(network->world->mutex);
        if (const ShmGroup* local = network->local.group) local->arena().between_hosts(local->rank).left.store(1);
    });
}

int rc_network_ended(rc_network* network, int process, int* ended, char* how, uint64_t bytes) {
    return guarded([&] {
        check_pointer("network", network);
        check_pointer("ended", ended);
        check_pointer("how", how);
        *ended = 0;
        const std::lock_guard lock(network->world->mutex);
        const int here = index_of(process, network->processes_here);
        if (here < 0) return;
        const ShmGroup& local = *network->local.group;
        Liveness& liveness = local.world->liveness;
        const int member = local.member(here);
        const bool dead = liveness.dead(member);  // first: it leaves before it ends
        const bool left = local.arena().between_hosts(here).left.load();
        *ended = dead || left;
        const std::string text = format("process %" PRId64 " ", liveness.pid(member)) + liveness.how_it_ended(member);
        copy_text(how, bytes, left ? "" : text);
    });
}

void rc_network_free(rc_network* network) {
    if (network && network->generation == fork_generation.load()) delete network;
}

int rc_network_group(rc_network* network, uint64_t number, int rank, int size, const int* members, const int* hosts,
                     rc_comm* local, rc_comm* parent, const rc_tuning* tuning, rc_comm** comm) {
    return guarded([&] {
        check_pointer("network", network);
        if (number >> NUMBER_BITS) rejectf("number: expected one of %d bits, got %" PRIu64, NUMBER_BITS, number);
        const Link& link = *network->world->link;
        check_members(link.rank, link.size, rank, size, members);
        check_pointer("hosts", hosts);
        check_tuning(tuning);
        check_pointer("comm", comm);
        HostLayout layout = layout_of(rank, size, hosts);
        LocalRanks here = local_ranks(local, layout, size, link);
        std::vector<std::shared_ptr<FailureState>> ancestors;
        if (parent) {
            ancestors = network_group(EntryGuard(*parent->handle)).lineage();
        } else if (here.group) {
            network->world->drains = here.group->drains;
            const std::lock_guard lock(network->world->mutex);
            network->local = here;
            for (const int r : layout.ranks[layout.host]) network->processes_here.push_back(members[r]);
        }
        if (here.group && here.group->ancestors().size() != ancestors.size()) {
            reject("local: expected ranks split from those that the parent has on this host");
        }
        auto group = std::make_unique<NetworkGroup>(
            network->world,
            NetworkGroupSpec{
                number, {members, members + size}, rank, std::move(layout), std::move(here), std::move(ancestors)},
            *tuning);
        *comm = new rc_comm{std::make_shared<CommHandle>(std::move(group))};
    });
}

int rc_agree_on_gpus(rc_comm* comm, int collective, const rc_call* arguments, double timeout) {
    return enter(comm, [&](const EntryGuard& entry) {
        const PeerGroup& group = entry.group();
        check_pointer("call", arguments);
        check_seconds("timeout", timeout);
        CallRecord call = called(collective, *arguments, timeout);
        check_call(call, group.rank, group.size);
        call.agrees_only = true;
        reject_in_signal_handler(group);
        entry->collectives.run(call);
    });
}
