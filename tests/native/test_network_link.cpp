// SocketLink over loopback TCP: contents and order of random traffic with cancellations, and every way to lose a peer.
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <string>

#include "network/sockets.h"
#include "network_world.h"

using namespace ringcomm;

namespace {

constexpr uint64_t HOUR = 3600ull * 1'000'000'000;
constexpr size_t LARGE = 16 << 20;  // more than the kernel buffers for one connection
constexpr std::byte UNTOUCHED{0xEE};

using Bytes = std::vector<std::byte>;

Bytes pattern(size_t bytes, unsigned seed) {
    Bytes found(bytes);
    for (size_t i = 0; i < bytes; ++i) found[i] = std::byte((i * 31 + (i >> 8) + seed * 7) & 0x7F);  // never UNTOUCHED
    return found;
}

bool untouched(const Bytes& memory) {
    return std::all_of(memory.begin(), memory.end(), [](std::byte each) { return each == UNTOUCHED; });
}

struct Rank final : LinkEvents {
    Rank(int rank, int size, const std::vector<int>& sockets) : packets(size), lost(size), link(rank, size, sockets) {}

    void packet_arrived(int peer, std::span<const std::byte> packet) override {
        packets[peer].emplace_back(packet.begin(), packet.end());
    }
    void peer_lost(int peer, const std::string& reason) override { lost[peer].push_back(reason); }
    bool progress() { return link.progress(*this); }

    std::vector<std::deque<Bytes>> packets;      // by peer
    std::vector<std::vector<std::string>> lost;  // by peer
    SocketLink link;
};

std::deque<Rank> ranks_of(int size) {
    std::vector<std::vector<int>> sockets(size, std::vector<int>(size, -1));
    for (int a = 0; a < size; ++a) {
        for (int b = 0; b < a; ++b) std::tie(sockets[a][b], sockets[b][a]) = connected();
    }
    std::deque<Rank> ranks;
    for (int r = 0; r < size; ++r) ranks.emplace_back(r, size, sockets[r]);
    return ranks;
}

// Both ranks in this thread, so that a test chooses who moves.
template <class Done>
void until(std::deque<Rank>& ranks, Done done) {
    while (!done()) {
        for (Rank& rank : ranks) rank.progress();
    }
}

// Rank 0, and the other end of its only connection.
struct Alone {
    Alone() : Alone(connected()) {}
    explicit Alone(std::pair<int, int> ends) : rank(0, 2, {-1, ends.first}), socket(ends.second) {}
    ~Alone() { hang_up(); }

    void write(const void* data, size_t bytes) const {
        for (auto next = static_cast<const char*>(data); bytes;) {
            const ssize_t sent = ::send(socket, next, bytes, MSG_NOSIGNAL);
            CHECK(sent > 0);
            next += sent;
            bytes -= sent;
        }
    }
    void write_header(uint64_t tag, uint64_t bytes) const {
        const uint64_t header[]{tag, bytes};
        write(header, sizeof header);
    }
    void hang_up() {
        if (socket >= 0) close(socket);
        socket = -1;
    }
    // Returns the reason, which must come once.
    std::string await_loss() {
        while (rank.lost[1].empty()) rank.progress();
        for (int i = 0; i < 10; ++i) rank.progress();
        CHECK(rank.lost[1].size() == 1);
        LinkTransfer transfer;
        std::byte data{};
        rank.link.send(1, 99, &data, 1, transfer);
        CHECK(transfer.state == LinkTransfer::FAILED);
        rank.link.receive(1, 99, &data, 1, transfer);
        CHECK(transfer.state == LinkTransfer::FAILED);
        rank.link.send_packet(1, {&data, 1});
        CHECK(rank.link.flushed());
        return rank.lost[1].front();
    }

    Rank rank;
    int socket;
};

struct Message {
    uint64_t tag;
    size_t bytes;
    unsigned seed;
    bool cancel_send, cancel_receive;
};

// What rank `from` sends to rank `to`: both compute it.
std::vector<Message> messages_between(int from, int to, int round) {
    std::mt19937 random(round * 100 + from * 10 + to);
    std::vector<Message> messages;
    for (unsigned i = 0; i < 60; ++i) {
        const size_t limits[]{0, 1, 16, 5000, 8192 - 16, 40'000, 300'000, 3 << 20};
        const size_t limit = i == 30 ? 3 << 20 : limits[random() % 7];
        messages.push_back({1 + random() % 5, limit ? random() % (limit + 1) : 0, unsigned(random()), random() % 8 == 0,
                            random() % 8 == 0});
    }
    return messages;
}

struct OpenTransfer {
    const Message* message;
    Bytes memory;
    LinkTransfer transfer{};
};

void random_traffic(Rank& rank, int round, std::atomic<int>& finished) {
    const int size = rank.link.size, own = rank.link.rank;
    std::mt19937 random(round * 1000 + own);
    std::deque<OpenTransfer> sends, receives;  // the addresses of their transfers stay
    struct Plan {
        int peer;
        std::vector<Message> to_send, to_receive;
        size_t sent = 0, received = 0;
    };
    std::vector<Plan> plans;
    for (int peer = 0; peer < size; ++peer) {
        if (peer == own) continue;
        Plan plan{peer, messages_between(own, peer, round), messages_between(peer, own, round)};
        // In the order of the sender for each tag, in another one between tags, so that frames come early.
        std::stable_sort(plan.to_receive.begin(), plan.to_receive.end(),
                         [&](const Message& a, const Message& b) { return (a.tag + round) % 3 < (b.tag + round) % 3; });
        plans.push_back(std::move(plan));
    }
    const auto more = [](const Plan& plan) {
        return plan.sent < plan.to_send.size() || plan.received < plan.to_receive.size();
    };
    for (;;) {
        bool any = false;
        for (Plan& plan : plans) {
            any |= more(plan);
            if (plan.sent < plan.to_send.size() && random() % 2) {
                const Message& message = plan.to_send[plan.sent++];
                const unsigned number = plan.sent;
                rank.link.send_packet(plan.peer, pattern(number % 7 ? number : number * 1000, number));
                auto& open = sends.emplace_back(&message, pattern(message.bytes, message.seed));
                rank.link.send(plan.peer, message.tag, open.memory.data(), message.bytes, open.transfer);
            }
            if (plan.received < plan.to_receive.size() && random() % 2) {
                const Message& message = plan.to_receive[plan.received++];
                auto& open = receives.emplace_back(&message, Bytes(message.bytes, UNTOUCHED));
                rank.link.receive(plan.peer, message.tag, open.memory.data(), message.bytes, open.transfer);
            }
        }
        for (auto* open : {&sends, &receives}) {
            for (OpenTransfer& each : *open) {
                const bool chosen = open == &sends ? each.message->cancel_send : each.message->cancel_receive;
                if (!chosen || each.transfer.ended() || random() % 16) continue;
                rank.link.cancel(each.transfer);
                CHECK(each.transfer.state == LinkTransfer::FAILED);
                std::fill(each.memory.begin(), each.memory.end(), UNTOUCHED);
            }
        }
        if (!rank.progress()) rank.link.sleep(random() % 4 * 10'000);
        const auto ended = [](const OpenTransfer& each) { return each.transfer.ended(); };
        if (!any && std::all_of(sends.begin(), sends.end(), ended) &&
            std::all_of(receives.begin(), receives.end(), ended)) {
            break;
        }
    }
    const auto all_packets = [&] {
        return std::all_of(plans.begin(), plans.end(),
                           [&](const Plan& plan) { return rank.packets[plan.peer].size() == plan.to_send.size(); });
    };
    while (!all_packets() || !rank.link.flushed()) rank.progress();
    for (const OpenTransfer& each : receives) {
        const bool canceled = each.transfer.state == LinkTransfer::FAILED;
        CHECK(!canceled || each.message->cancel_receive);
        CHECK(canceled ? untouched(each.memory) : each.memory == pattern(each.message->bytes, each.message->seed));
    }
    for (const Plan& plan : plans) {
        unsigned number = 0;
        for (const Bytes& packet : rank.packets[plan.peer]) {
            ++number;
            CHECK(packet == pattern(number % 7 ? number : number * 1000, number));
        }
        CHECK(rank.lost[plan.peer].empty());
    }
    ++finished;
    while (finished < size) rank.progress();  // their canceled receives may still wait for frames
}

void exchange_at_random() {
    for (int round = 0; round < 6; ++round) {
        auto ranks = ranks_of(2 + round % 3);
        std::atomic<int> finished{0};
        std::vector<std::thread> threads;
        for (Rank& rank : ranks) threads.emplace_back([&] { random_traffic(rank, round, finished); });
        for (auto& thread : threads) thread.join();
    }
}

void many_peers() {
    constexpr int SIZE = 12;
    auto ranks = ranks_of(SIZE);
    std::deque<OpenTransfer> receives, sends;
    for (int r = 0; r < SIZE; ++r) {
        for (int peer = 0; peer < SIZE; ++peer) {
            if (peer == r) continue;
            auto& out = sends.emplace_back(nullptr, pattern(100'000, r * SIZE + peer));
            ranks[r].link.send(peer, 1, out.memory.data(), out.memory.size(), out.transfer);
            auto& in = receives.emplace_back(nullptr, Bytes(100'000));
            ranks[r].link.receive(peer, 1, in.memory.data(), in.memory.size(), in.transfer);
            ranks[r].link.send_packet(peer, pattern(10, r));
        }
    }
    const auto done = [&](int r) {
        for (int peer = 0; peer < SIZE; ++peer) {
            if (peer != r && ranks[r].packets[peer].empty()) return false;
        }
        return true;
    };
    until(ranks, [&] {
        for (int r = 0; r < SIZE; ++r) {
            if (!done(r)) return false;
        }
        return std::all_of(receives.begin(), receives.end(), [](const auto& each) { return each.transfer.ended(); });
    });
    size_t next = 0;
    for (int r = 0; r < SIZE; ++r) {
        for (int peer = 0; peer < SIZE; ++peer) {
            if (peer == r) continue;
            CHECK(receives[next++].memory == pattern(100'000, peer * SIZE + r));
            CHECK(ranks[r].packets[peer].front() == pattern(10, peer));
        }
    }
}

void canceled_receives() {
    auto ranks = ranks_of(2);
    SocketLink &sender = ranks[0].link, &receiver = ranks[1].link;
    LinkTransfer first, second, sent;
    const Bytes a = pattern(LARGE, 1), b = pattern(5000, 2);

    // Before its frame: the next receive gets the next frame.
    Bytes into_first(LARGE, UNTOUCHED), into_second(5000);
    receiver.receive(0, 1, into_first.data(), LARGE, first);
    receiver.receive(0, 1, into_second.data(), 5000, second);
    receiver.cancel(first);
    CHECK(first.state == LinkTransfer::FAILED);
    LinkTransfer sent_b;
    sender.send(1, 1, a.data(), LARGE, sent);
    sender.send(1, 1, b.data(), 5000, sent_b);
    until(ranks, [&] { return second.ended(); });
    CHECK(second.state == LinkTransfer::DONE && into_second == b && untouched(into_first));

    // In the middle of it.
    receiver.receive(0, 1, into_first.data(), LARGE, first);
    sender.send(1, 1, a.data(), LARGE, sent);
    until(ranks, [&] { return into_first[100'000] != UNTOUCHED; });
    CHECK(!first.ended());
    receiver.cancel(first);
    std::fill(into_first.begin(), into_first.end(), UNTOUCHED);
    sender.send(1, 1, b.data(), 5000, sent_b);
    receiver.receive(0, 1, into_second.data(), 5000, second);
    until(ranks, [&] { return second.ended(); });
    CHECK(into_second == b && untouched(into_first));

    // A receive that takes over a frame which has arrived in part, and is canceled then.
    for (const bool canceled : {false, true}) {
        sender.send(1, 2, a.data(), LARGE, sent);
        for (int i = 0; i < 20; ++i) {
            ranks[0].progress();
            ranks[1].progress();
        }
        receiver.receive(0, 2, into_first.data(), LARGE, first);
        CHECK(into_first[100] != UNTOUCHED && !first.ended());
        if (canceled) {
            receiver.cancel(first);
            std::fill(into_first.begin(), into_first.end(), UNTOUCHED);
        }
        until(ranks, [&] { return sent.ended() && (canceled || first.ended()); });
        CHECK(canceled ? untouched(into_first) : into_first == a);
        std::fill(into_first.begin(), into_first.end(), UNTOUCHED);
    }
    sender.send(1, 2, b.data(), 5000, sent_b);
    receiver.receive(0, 2, into_second.data(), 5000, second);
    until(ranks, [&] { return second.ended(); });
    CHECK(into_second == b);
    receiver.cancel(second);  // it has ended
    CHECK(second.state == LinkTransfer::DONE);
}

void canceled_sends() {
    auto ranks = ranks_of(2);
    Bytes begun = pattern(LARGE, 1), queued = pattern(LARGE, 2), found(LARGE);
    LinkTransfer sends[2], receive;
    ranks[0].link.send(1, 1, begun.data(), LARGE, sends[0]);
    ranks[0].link.send(1, 1, queued.data(), LARGE, sends[1]);
    for (int i = 0; i < 10; ++i) ranks[0].progress();
    for (LinkTransfer& each : sends) {
        CHECK(!each.ended());
        ranks[0].link.cancel(each);
        CHECK(each.state == LinkTransfer::FAILED);
    }
    std::fill(begun.begin(), begun.end(), UNTOUCHED);
    std::fill(queued.begin(), queued.end(), UNTOUCHED);
    CHECK(!ranks[0].link.flushed());
    for (const unsigned seed : {1, 2}) {
        ranks[1].link.receive(0, 1, found.data(), LARGE, receive);
        until(ranks, [&] { return receive.ended(); });
        CHECK(found == pattern(LARGE, seed));
    }
    until(ranks, [&] { return ranks[0].link.flushed(); });
}

void closes_within_a_frame(bool posted) {
    Alone alone;
    const Bytes whole = pattern(100, 1);
    alone.write_header(1, 100);
    alone.write(whole.data(), 100);
    alone.write_header(0, 100);
    alone.write(whole.data(), 100);
    alone.write_header(2, 20'000);
    alone.write(whole.data(), 100);
    LinkTransfer part, unbegun, early, queued;
    Bytes into_part(20'000), into_unbegun(10), into_early(100), large(LARGE);
    SocketLink& link = alone.rank.link;
    if (posted) link.receive(1, 2, into_part.data(), 20'000, part);
    link.receive(1, 3, into_unbegun.data(), 10, unbegun);
    while (alone.rank.packets[1].empty()) alone.rank.progress();
    link.send(1, 1, large.data(), LARGE, queued);
    CHECK(!queued.ended());
    shutdown(alone.socket, SHUT_WR);
    CHECK(alone.await_loss() == "closed the connection");
    CHECK(unbegun.state == LinkTransfer::FAILED && queued.state == LinkTransfer::FAILED);
    CHECK(!posted || part.state == LinkTransfer::FAILED);
    link.receive(1, 2, into_part.data(), 20'000, part);
    CHECK(part.state == LinkTransfer::FAILED);
    link.receive(1, 1, into_early.data(), 100, early);  // it had come before
    CHECK(early.state == LinkTransfer::DONE && into_early == whole);
}

void resets() {
    Alone alone;
    const linger at_once{1, 0};
    LinkTransfer receive;
    std::byte data;
    alone.rank.link.receive(1, 1, &data, 1, receive);
    CHECK(setsockopt(alone.socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    alone.hang_up();
    CHECK(alone.await_loss() == strerror(ECONNRESET));
    CHECK(receive.state == LinkTransfer::FAILED);
}

// What the peer sent before it went away arrives, although sends fail already.
void packets_before_the_end_arrive() {
    Alone alone;
    const Bytes packet = pattern(1000, 1);
    for (int i = 0; i < 50; ++i) {
        alone.write_header(0, 1000);
        alone.write(packet.data(), 1000);
    }
    alone.hang_up();
    Bytes data(1000);
    LinkTransfer transfer;
    do alone.rank.link.send(1, 1, data.data(), data.size(), transfer);
    while (transfer.state == LinkTransfer::DONE);
    CHECK(transfer.state == LinkTransfer::FAILED);
    alone.await_loss();
    CHECK(alone.rank.packets[1].size() == 50);
}

void garbage() {
    const std::pair<uint64_t, uint64_t> headers[]{
        {7, UINT64_MAX}, {0, Link::MAX_PACKET + 1}, {1, 100}, {7, (1ull << 30) + 1}};
    for (const auto& [tag, bytes] : headers) {
        Alone alone;
        LinkTransfer receive;
        Bytes target(99, UNTOUCHED);
        alone.rank.link.receive(1, 1, target.data(), target.size(), receive);
        alone.write_header(tag, bytes);
        const std::string reason = alone.await_loss();
        CHECK(reason.find("sent " + std::to_string(bytes) + " bytes") == 0);
        CHECK(receive.state == LinkTransfer::FAILED && untouched(target));
    }
    // The frame comes before the receive of another length.
    Alone alone;
    alone.write_header(1, 5);
    alone.write("12345", 5);
    alone.write_header(0, 0);
    while (alone.rank.packets[1].empty()) alone.rank.progress();
    LinkTransfer receive;
    std::byte target{UNTOUCHED};
    alone.rank.link.receive(1, 1, &target, 1, receive);
    CHECK(receive.state == LinkTransfer::FAILED && target == UNTOUCHED);
    CHECK(alone.await_loss() == "sent 5 bytes to a receive of 1");
}

// Every step sleeps for an hour, unless it is woken.
void sleeping() {
    auto ranks = ranks_of(2);
    std::mutex mutexes[2];
    const auto advance = [&](int rank) {
        const bool moved = [&] {
            const std::lock_guard lock(mutexes[rank]);
            return ranks[rank].progress();
        }();
        if (!moved) ranks[rank].link.sleep(HOUR);
    };
    // The sender sleeps until there is room, the receiver until something comes, which a third thread sends.
    const Bytes data = pattern(LARGE, 1);
    Bytes found(LARGE);
    LinkTransfer send, receive;
    ranks[0].link.receive(1, 2, nullptr, 0, receive);  // ends with the first progress of rank 1's answer
    LinkTransfer large, answer;
    ranks[1].link.receive(0, 1, found.data(), LARGE, large);
    std::thread receiver([&] {
        while (!large.ended()) advance(1);
        const std::lock_guard lock(mutexes[1]);
        ranks[1].link.send(0, 2, nullptr, 0, answer);
    });
    std::thread sender([&] {
        while (!receive.ended()) advance(0);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // most often both sleep by now
    {
        const std::lock_guard lock(mutexes[0]);
        ranks[0].link.send(1, 1, data.data(), LARGE, send);
    }
    sender.join();
    receiver.join();
    CHECK(found == data && send.state == LinkTransfer::DONE && answer.state == LinkTransfer::DONE);
}

}  // namespace

int main() {
    exchange_at_random();
    many_peers();
    canceled_receives();
    canceled_sends();
    for (const bool posted : {true, false}) closes_within_a_frame(posted);
    resets();
    packets_before_the_end_arrive();
    garbage();
    sleeping();
    printf("test_network_link: %d failures\n", failures.load());
    return failures != 0;
}
