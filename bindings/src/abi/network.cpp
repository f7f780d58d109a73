// The C ABI of networks and their communicators.
#include <algorithm>
#include <cinttypes>

#include "abi/handles.h"
#include "core/collectives.h"
#include "link/message_link.h"
#include "link/mpi.h"
#include "link/sockets.h"
#include "link/ucx.h"
#include "network/group.h"

using namespace ringcomm;

struct rc_network {
    std::shared_ptr<NetworkWorld> world;
    MessageLink* messages = nullptr;  // over MPI
    SocketLink* sockets = nullptr;
    const uint64_t generation = fork_generation.load();
    // Of the first communicator, under the mutex of the world.
    LocalRanks local{};
    std::vector<int> processes_here{};
};

struct rc_ucx {
    std::unique_ptr<UcxMessages> messages;
    const std::string path, version, transports;
    const uint64_t generation = fork_generation.load();
};

namespace {

constexpr int MAX_FLOWS = 1 << 10;  // to a peer

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

SocketLink& sockets_of(rc_network* network) {
    check_pointer("network", network);
    if (!network->sockets) reject("network: expected one of rc_network_open");
    return *network->sockets;
}

UcxMessages& messages_of(rc_ucx* ucx) {
    check_pointer("ucx", ucx);
    if (!ucx->messages) reject("ucx: a network has it already");
    return *ucx->messages;
}

}  // namespace

int rc_network_open(int rank, int size, const int* sockets, const char* name, double idle_timeout,
                    double resend_timeout, rc_network** network) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("sockets", sockets);
        if (sockets[rank] != -1) rejectf("sockets: expected -1 for process %d, got %d", rank, sockets[rank]);
        check_pointer("name", name);
        check_seconds("idle_timeout", idle_timeout);
        check_seconds("resend_timeout", resend_timeout);
        check_pointer("network", network);
        const std::span each(sockets, size);
        auto link = std::make_unique<SocketLink>(rank, size, each, name, idle_timeout, resend_timeout);
        SocketLink* const opened = link.get();
        *network = new rc_network{std::make_shared<NetworkWorld>(std::move(link)), nullptr, opened};
    });
}

int rc_network_wanted(rc_network* network, int* readable, int* processes, int* flows, int* count) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        check_pointer("readable", readable);
        check_pointer("processes", processes);
        check_pointer("flows", flows);
        check_pointer("count", count);
        const std::lock_guard lock(network->world->mutex);
        *count = 0;
        for (const auto& [peer, flow] : sockets.take_wanted()) {
            processes[*count] = peer;
            flows[(*count)++] = flow;
        }
        *readable = sockets.wanted_descriptor();
    });
}

int rc_network_connect(rc_network* network, int process, int socket, const char* failure) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        Descriptor connected(socket);
        check_rank("process", process, 0, sockets.size);
        NetworkWorld& world = *network->world;
        const std::lock_guard lock(world.mutex);
        if (!sockets.awaits_socket(process)) return;
        if (socket >= 0) {
            sockets.begin(process, std::exchange(connected.fd, -1));
            return world.connected(process);
        }
        if (!failure) {
            constexpr int MOST = 64;  // calls of progress(): what has come before may say that it has died
            for (int i = 0; i < MOST && world.progress(); ++i) continue;
            if (!sockets.awaits_socket(process)) return;
            world.left(process);
        }
        sockets.give_up(process, failure ? failure : "closed all communicators");
        world.progress();
    });
}

int rc_network_fail(rc_network* network, const char* what_this_rank_cannot) {
    return guarded([&] {
        check_pointer("network", network);
        check_pointer("what_this_rank_cannot", what_this_rank_cannot);
        const std::lock_guard lock(network->world->mutex);
        network->world->fail(what_this_rank_cannot);
    });
}

int rc_network_want_flows(rc_network* network, int count) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        check_range("count", count, 0, MAX_FLOWS);
        const std::lock_guard lock(network->world->mutex);
        sockets.want_flows(count);
    });
}

int rc_network_add_flow(rc_network* network, int process, int socket) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        Descriptor connected(socket);
        check_rank("process", process, 0, sockets.size);
        check_range("socket", socket, 0, INT32_MAX);
        const std::lock_guard lock(network->world->mutex);
        sockets.add_flow(process, std::exchange(connected.fd, -1));
    });
}

int rc_network_ended_flow(rc_network* network, int* process, int* left, char* reason, uint64_t bytes) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        check_pointer("process", process);
        check_pointer("left", left);
        check_pointer("reason", reason);
        const std::lock_guard lock(network->world->mutex);
        *process = -1;
        if (const auto ended = sockets.take_ended_flow()) {
            *process = ended->peer;
            *left = int(ended->left);
            snprintf(reason, bytes, "%s", ended->reason.c_str());
        }
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

int rc_network_open_mpi(int rank, int size, const rc_mpi* mpi, rc_network** network) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("mpi", mpi);
        check_pointer("network", network);
        check_range("most_tag", mpi->most_tag, 1, INT32_MAX);
        if (mpi->handle_bytes != sizeof(int) && mpi->handle_bytes != sizeof(void*)) {
            rejectf("handle_bytes: expected %zu or %zu, got %d", sizeof(int), sizeof(void*), mpi->handle_bytes);
        }
        auto link = std::make_unique<MessageLink>(rank, size, mpi_messages(*mpi));
        MessageLink* const opened = link.get();
        *network = new rc_network{std::make_shared<NetworkWorld>(std::move(link)), opened};
    });
}

int rc_ucx_open(const char* library, const char* devices, double keepalive, rc_ucx** ucx) {
    return guarded([&] {
        check_pointer("library", library);
        check_pointer("devices", devices);
        check_seconds("keepalive", keepalive);
        check_pointer("ucx", ucx);
        auto messages = std::make_unique<UcxMessages>(library, devices, keepalive);
        const std::string path = messages->path(), version = messages->version(), transports = messages->transports();
        *ucx = new rc_ucx{std::move(messages), path, version, transports};
    });
}

int rc_ucx_describe(rc_ucx* ucx, const char** path, const char** version, const char** transports) {
    return guarded([&] {
        check_pointer("ucx", ucx);
        check_pointer("path", path);
        check_pointer("version", version);
        check_pointer("transports", transports);
        *path = ucx->path.c_str();
        *version = ucx->version.c_str();
        *transports = ucx->transports.c_str();
    });
}

int rc_ucx_address(rc_ucx* ucx, const void** address, uint64_t* bytes) {
    return guarded([&] {
        check_pointer("address", address);
        check_pointer("bytes", bytes);
        const std::span<const std::byte> found = messages_of(ucx).address();
        *address = found.data();
        *bytes = found.size();
    });
}

int rc_ucx_connect(rc_ucx* ucx, int rank, int size, const void* const* addresses) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("addresses", addresses);
        UcxMessages& messages = messages_of(ucx);
        if (messages.size()) reject("ucx: it has begun to connect");
        messages.connect(rank, std::vector<const void*>(addresses, addresses + size));
    });
}

int rc_ucx_await(rc_ucx* ucx, double timeout, int* connected) {
    return guarded([&] {
        check_seconds("timeout", timeout);
        check_pointer("connected", connected);
        messages_of(ucx).await_peers(deadline_of(now_ns(), timeout), connected);
    });
}

int rc_network_open_ucx(rc_ucx* ucx, rc_network** network) {
    return guarded([&] {
        check_pointer("network", network);
        UcxMessages& messages = messages_of(ucx);
        if (!messages.size()) reject("ucx: it has not connected");
        auto link = std::make_unique<MessageLink>(messages.rank(), messages.size(), std::move(ucx->messages));
        *network = new rc_network{std::make_shared<NetworkWorld>(std::move(link))};
    });
}

void rc_ucx_free(rc_ucx* ucx) {
    if (ucx && ucx->generation == fork_generation.load()) delete ucx;
}

int rc_network_leave(rc_network* network, rc_leaving* leaving) {
    return guarded([&] {
        check_pointer("network", network);
        check_pointer("leaving", leaving);
        if (!network->messages) reject("network: expected one of rc_network_open_mpi");
        const std::lock_guard lock(network->world->mutex);
        network->messages->leave();
        network->world->progress();
        *leaving = network->messages->leaving();
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
            NetworkMembership{
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
