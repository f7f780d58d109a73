// Ranks that SocketLinks over loopback TCP join, for the tests of links.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <string>

#include "link/sockets.h"
#include "network_world.h"

using ringcomm::LinkTransfer;
using Bytes = std::vector<std::byte>;

constexpr size_t LARGE = 16 << 20;  // more than the kernel buffers for one connection
constexpr std::byte UNTOUCHED{0xEE};

inline Bytes pattern(size_t bytes, unsigned seed) {
    Bytes found(bytes);
    for (size_t i = 0; i < bytes; ++i) found[i] = std::byte((i * 31 + (i >> 8) + seed * 7) & 0x7F);  // never UNTOUCHED
    return found;
}

inline bool untouched(const Bytes& memory) {
    return std::all_of(memory.begin(), memory.end(), [](std::byte each) { return each == UNTOUCHED; });
}

using StreamPair = std::pair<std::unique_ptr<ringcomm::ByteStream>, std::unique_ptr<ringcomm::ByteStream>>;

inline StreamPair connected_streams() {
    const auto [a, b] = connected();
    return {std::make_unique<ringcomm::ByteStream>(a), std::make_unique<ringcomm::ByteStream>(b)};
}

struct Rank final : ringcomm::LinkEvents {
    Rank(int rank, int size, const std::string& name = unused_name())
        : packets(size), lost(size), link(rank, size, name, 15, 15) {}

    void packet_arrived(int peer, std::span<const std::byte> packet) override {
        packets[peer].emplace_back(packet.begin(), packet.end());
    }
    void peer_lost(int peer, const std::string& reason) override { lost[peer].push_back(reason); }
    void packet_queued(int) override { ++queued; }
    bool progress() { return link.progress(*this); }

    std::vector<std::deque<Bytes>> packets;      // by peer
    std::vector<std::vector<std::string>> lost;  // by peer
    int queued = 0;                              // how often a packet of the link itself was
    ringcomm::SocketLink link;
};

inline std::deque<Rank> ranks_of(int size, const std::function<StreamPair()>& connect = connected_streams) {
    std::deque<Rank> ranks;
    const std::string name = unused_name();
    for (int r = 0; r < size; ++r) ranks.emplace_back(r, size, name);
    for (int a = 0; a < size; ++a) {
        for (int b = 0; b < a; ++b) {
            auto [of_a, of_b] = connect();
            ranks[a].link.begin(b, std::move(of_a));
            ranks[b].link.begin(a, std::move(of_b));
        }
    }
    return ranks;
}

// Joins each two ranks by further connections, and returns a descriptor for each end of each, by flow.
inline std::vector<std::vector<int>> add_flows(std::deque<Rank>& ranks, int flows,
                                               const std::function<StreamPair()>& connect = connected_streams) {
    std::vector<std::vector<int>> ends(flows);
    for (size_t a = 0; a < ranks.size(); ++a) {
        for (size_t b = 0; b < a; ++b) {
            for (int flow = 0; flow < flows; ++flow) {
                auto [of_a, of_b] = connect();
                ends[flow].insert(ends[flow].end(), {dup(of_a->fd), dup(of_b->fd)});
                ranks[a].link.add_flow(int(b), std::move(of_a));
                ranks[b].link.add_flow(int(a), std::move(of_b));
            }
        }
    }
    return ends;
}

// Both ranks in this thread, so that a test chooses who moves.
template <class Done>
void until(std::deque<Rank>& ranks, Done done) {
    while (!done()) {
        for (Rank& rank : ranks) rank.progress();
    }
}
