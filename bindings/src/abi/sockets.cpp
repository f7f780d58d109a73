// The C ABI of networks over sockets: the connections that a process makes for them.
#include "abi/network.h"
#include "abi/tls.h"

using namespace ringcomm;

namespace {

constexpr int MAX_FLOWS = 1 << 10;  // to a peer

SocketLink& sockets_of(rc_network* network) {
    check_pointer("network", network);
    if (!network->sockets) reject("network: expected one of rc_network_open");
    return *network->sockets;
}

}  // namespace

int rc_network_open(int rank, int size, const char* name, double idle_timeout, double resend_timeout,
                    rc_network** network) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("name", name);
        check_seconds("idle_timeout", idle_timeout);
        check_seconds("resend_timeout", resend_timeout);
        check_pointer("network", network);
        auto link = std::make_unique<SocketLink>(rank, size, name, idle_timeout, resend_timeout);
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
        for (const auto& [peer, flow] : sockets.requests().take_wanted(sockets.size)) {
            processes[*count] = peer;
            flows[(*count)++] = flow;
        }
        *readable = sockets.requests().descriptor();
    });
}

int rc_network_connect(rc_network* network, int process, int socket, rc_tls* tls, const char* failure) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        auto stream = adopt(socket, tls);
        check_rank("process", process, 0, sockets.size);
        NetworkWorld& world = *network->world;
        const std::lock_guard lock(world.mutex);
        if (!sockets.awaits_socket(process)) return;
        if (stream) {
            sockets.begin(process, std::move(stream));
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

int rc_network_want_flows(rc_network* network, int count) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        check_range("count", count, 0, MAX_FLOWS);
        const std::lock_guard lock(network->world->mutex);
        sockets.want_flows(count);
    });
}

int rc_network_add_flow(rc_network* network, int process, int socket, rc_tls* tls) {
    return guarded([&] {
        SocketLink& sockets = sockets_of(network);
        auto stream = adopt(socket, tls);
        check_rank("process", process, 0, sockets.size);
        check_range("socket", socket, 0, INT32_MAX);
        const std::lock_guard lock(network->world->mutex);
        sockets.add_flow(process, std::move(stream));
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
        if (const auto ended = sockets.requests().take_ended_flow()) {
            *process = ended->peer;
            *left = int(ended->left);
            snprintf(reason, bytes, "%s", ended->reason.c_str());
        }
    });
}
