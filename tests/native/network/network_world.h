// Ranks on several hosts for the native tests: threads whose processes and hosts exist only for the core. Ranks of one
// host share memory, and each has connections of its own to those of the others.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <barrier>
#include <string>
#include <tuple>
#include <utility>

#include "world.h"

// Two ends of a TCP connection.
inline std::pair<int, int> connected() {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
              client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    CHECK(bind(listener, name, sizeof address) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, name, &bytes) == 0 && connect(client, name, sizeof address) == 0);
    const int server = accept(listener, nullptr, nullptr);
    CHECK(server >= 0);
    close(listener);
    return {client, server};
}

// For a network.
inline std::string unused_name() {
    static std::atomic<int> last{0};
    return "test " + std::to_string(getpid()) + " " + std::to_string(++last);
}

struct NetworkRank {
    int rank, size;
    std::vector<int> sockets{};     // to the ranks of other hosts
    std::barrier<>* all = nullptr;  // of the threads, beside the library
    rc_network* network = nullptr;
    rc_comm *local = nullptr, *comm = nullptr;
};

enum class Connected { AT_FIRST, WHEN_NEEDED };

// Makes the connections that ranks need, until `stops`.
inline void connect_when_needed(std::vector<NetworkRank>& ranks, const std::atomic<bool>& stops) {
    const int size = int(ranks.size());
    std::vector<std::vector<bool>> done(size, std::vector<bool>(size));
    std::vector<int> needed(size), flows(size);
    for (NetworkRank& rank : ranks) DO(rc_network_want_flows(rank.network, 2));
    while (!stops) {
        for (int r = 0; r < size; ++r) {
            int readable, count;
            DO(rc_network_wanted(ranks[r].network, &readable, needed.data(), flows.data(), &count));
            for (int i = 0; i < count; ++i) {
                const int peer = needed[i];
                if (done[r][peer] && !flows[i]) continue;
                const auto [mine, theirs] = connected();
                if (flows[i]) {
                    DO(rc_network_add_flow(ranks[r].network, peer, mine, nullptr));
                    DO(rc_network_add_flow(ranks[peer].network, r, theirs, nullptr));
                } else {
                    done[r][peer] = done[peer][r] = true;
                    DO(rc_network_connect(ranks[r].network, peer, mine, nullptr, nullptr));
                    DO(rc_network_connect(ranks[peer].network, r, theirs, nullptr, nullptr));
                }
            }
        }
        std::this_thread::yield();
    }
}

// Calls body(rank) on every rank of a layout such as "0011", which has a character per rank: its host.
inline void on_hosts(const std::string& layout, const rc_tuning& tuning, const std::function<void(NetworkRank&)>& body,
                     Connected when = Connected::AT_FIRST) {
    const int size = int(layout.size());
    std::vector<NetworkRank> ranks(size);
    std::barrier<> all(size);
    std::vector<int> members(size), hosts(layout.begin(), layout.end());
    const std::string name = unused_name();
    for (int r = 0; r < size; ++r) {
        members[r] = r;
        ranks[r].rank = r;
        ranks[r].size = size;
        ranks[r].all = &all;
    }
    bool shares = false;
    for (int first = 0; first < size; ++first) {
        if (layout.find(layout[first]) != size_t(first)) continue;  // a host that is there already
        std::vector<int> here;
        for (int r = first; r < size; ++r) {
            if (layout[r] == layout[first]) here.push_back(r);
        }
        shares |= here.size() > 1;
        int fd;
        DO(rc_file_create(&fd));
        const int number = int(here.size());
        const std::vector<int64_t> pids(number, getpid());
        const std::vector<int> pidfds(number, -1);
        for (int i = 0; i < number; ++i) {
            DO(rc_world_open(fd, i, number, pids.data(), pidfds.data(), 4711, &NOWHERE, &tuning,
                             &ranks[here[i]].local));
        }
        close(fd);
    }
    for (NetworkRank& rank : ranks) {
        DO(rc_network_open(rank.rank, size, name.c_str(), 15, 15, &rank.network));
        for (int other = 0; other < rank.rank; ++other) {
            if (layout[other] == layout[rank.rank] || when == Connected::WHEN_NEEDED) continue;
            const auto [mine, theirs] = connected();
            rank.sockets.push_back(mine);
            ranks[other].sockets.push_back(theirs);
            DO(rc_network_connect(rank.network, other, mine, nullptr, nullptr));
            DO(rc_network_connect(ranks[other].network, rank.rank, theirs, nullptr, nullptr));
        }
    }
    std::atomic<bool> stops{false};
    std::thread connecting([&] { connect_when_needed(ranks, stops); });
    std::vector<std::thread> threads;
    for (NetworkRank& rank : ranks) {
        threads.emplace_back([&] {
            DO(rc_network_group(rank.network, 1, rank.rank, size, members.data(), hosts.data(),
                                shares ? rank.local : nullptr, nullptr, &tuning, &rank.comm));
            body(rank);
            rc_free(rank.comm);
            rc_free(rank.local);
            DO(rc_network_flush(rank.network));
        });
    }
    for (auto& thread : threads) thread.join();
    stops = true;
    connecting.join();
    for (const NetworkRank& rank : ranks) rc_network_free(rank.network);
}
