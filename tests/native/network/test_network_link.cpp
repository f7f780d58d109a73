// A link between ranks: contents and order of random traffic with cancellations, many peers, ranks that sleep.
#include <sys/socket.h>

#include <chrono>
#include <random>

#include "links.h"

using namespace ringcomm;

namespace {

constexpr uint64_t HOUR = 3600ull * 1'000'000'000;

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

// The flows end one after another, while they are used: all, or all but the last.
void exchange_at_random(int flows, int left) {
    for (int round = 0; round < 6; ++round) {
        auto ranks = ranks_of(2 + round % 3);
        const auto ends = add_flows(ranks, flows);
        std::atomic<int> finished{0};
        std::vector<std::thread> threads;
        for (Rank& rank : ranks) threads.emplace_back([&] { random_traffic(rank, round, finished); });
        for (int flow = 0; flow + left < flows; ++flow) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            for (const int end : ends[flow]) shutdown(end, SHUT_RDWR);
        }
        for (auto& thread : threads) thread.join();
        for (const auto& of_flow : ends) {
            for (const int end : of_flow) close(end);
        }
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
    for (const int flows : {0, 1, 4}) exchange_at_random(flows, 1);
    exchange_at_random(3, 0);
    many_peers();
    sleeping();
    printf("test_network_link: %d failures\n", failures.load());
    return failures != 0;
}
