// SocketLink and the bytes of its peer: every way to lose the peer, and headers that no link sends.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/waiting.h"
#include "links.h"

using namespace ringcomm;

namespace {

// Rank 0, and the other end of its only connection.
struct Alone {
    Alone() : Alone(connected()) {}
    explicit Alone(std::pair<int, int> ends) : rank(0, 2), socket(ends.second) {
        rank.link.begin(1, std::make_unique<ByteStream>(ends.first));
    }
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

// The peer sends 256 MiB before any receive: it has to wait, and all of it arrives.
void early_data_is_bounded() {
    Alone alone;
    constexpr size_t FRAMES = 256, FRAME = 1 << 20;
    const Bytes payload = pattern(FRAME, 1);
    std::atomic<size_t> sent{0};
    std::thread peer([&] {
        for (; sent < FRAMES; ++sent) {
            alone.write_header(1, FRAME);
            alone.write(payload.data(), FRAME);
        }
    });
    for (size_t before = FRAMES; sent != before;) {  // until it no longer gets on
        before = sent;
        for (int i = 0; i < 20; ++i) {
            while (alone.rank.progress()) continue;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }
    CHECK(sent >= 60 && sent < 160);  // 64 MiB, and what the kernel holds
    for (size_t i = 0; i < FRAMES; ++i) {
        Bytes target(FRAME, UNTOUCHED);
        LinkTransfer receive;
        alone.rank.link.receive(1, 1, target.data(), FRAME, receive);
        while (!receive.ended()) alone.rank.progress();
        CHECK(receive.state == LinkTransfer::DONE && target == payload);
    }
    peer.join();
}

// Neither what came before, what is arriving, nor what follows is kept, or stays in the way of other tags.
void a_dropped_tag_is_discarded() {
    Alone alone;
    SocketLink& link = alone.rank.link;
    const Bytes payload = pattern(20'000, 1);
    alone.write_header(1, 20'000);
    alone.write(payload.data(), 20'000);
    alone.write_header(1, 20'000);
    alone.write(payload.data(), 5'000);
    while (alone.rank.progress()) continue;
    Bytes canceled(20'000, UNTOUCHED), wanted(20'000, UNTOUCHED);
    link.drop(1);
    alone.write(payload.data() + 5'000, 15'000);
    LinkTransfer dropped, other;
    link.receive(1, 1, canceled.data(), canceled.size(), dropped);
    CHECK(dropped.state == LinkTransfer::FAILED);
    alone.write_header(1, 10'000);  // which that receive did not expect
    alone.write(payload.data(), 10'000);
    alone.write_header(2, 20'000);
    alone.write(payload.data(), 20'000);
    link.receive(1, 2, wanted.data(), wanted.size(), other);
    while (!other.ended()) alone.rank.progress();
    CHECK(other.state == LinkTransfer::DONE && wanted == payload);
    CHECK(untouched(canceled));
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

// Datagrams that nobody has read count against their sender, whose own threads it wakes all the same. To read them
// takes no sleep: a rank that waits elsewhere only makes progress now and then.
void wake_ups_that_nobody_reads() {
    constexpr int SIZE = 40, MOST_UNREAD = 10;  // of a process, at least
    constexpr uint64_t LONG_NS = 20'000'000'000, SHORT_NS = 20'000'000;
    const std::string name = unused_name();
    std::deque<Rank> ranks;
    for (int r = 0; r < SIZE; ++r) ranks.emplace_back(r, SIZE, name);
    SocketLink& first = ranks[0].link;
    for (int i = 0; i < MOST_UNREAD; ++i) {
        for (int r = 1; r < SIZE; ++r) first.wake_peer(r);
    }
    const auto slept = [](SocketLink& link, uint64_t ns) {
        const uint64_t begin = now_ns();
        link.sleep(ns);
        return now_ns() - begin;
    };
    first.wake();
    CHECK(slept(first, LONG_NS) < LONG_NS / 2);
    for (const uint64_t begin = now_ns(); now_ns() - begin < 15 * SHORT_NS;) ranks[1].progress();
    ranks[1].link.sleep(LONG_NS);  // progress has woken who sleeps
    CHECK(slept(ranks[1].link, SHORT_NS) >= SHORT_NS);
    first.wake_peer(1);
    CHECK(slept(ranks[1].link, LONG_NS) < LONG_NS / 2);
}

}  // namespace

int main() {
    for (const bool posted : {true, false}) closes_within_a_frame(posted);
    resets();
    packets_before_the_end_arrive();
    early_data_is_bounded();
    a_dropped_tag_is_discarded();
    garbage();
    wake_ups_that_nobody_reads();
    printf("test_socket_link: %d failures\n", failures.load());
    return failures != 0;
}
