// Flows: when a send has ended, and what becomes of transfers whose flow has.
#include <sys/socket.h>

#include <cstring>

#include "links.h"

using namespace ringcomm;

namespace {

constexpr size_t PAYLOAD = 1 << 20;

struct Sent {
    Sent(std::deque<Rank>& ranks, int from, unsigned seed) : data(pattern(PAYLOAD, seed)), found(PAYLOAD, UNTOUCHED) {
        ranks[from].link.send(1 - from, 1, data.data(), PAYLOAD, send);
        ranks[1 - from].link.receive(from, 1, found.data(), PAYLOAD, receive);
    }
    bool ended() const { return send.ended() && receive.ended(); }
    bool arrived() const {
        return send.state == LinkTransfer::DONE && receive.state == LinkTransfer::DONE && data == found;
    }

    Bytes data, found;
    LinkTransfer send, receive;
};

// The sender keeps what the receiver has not acknowledged, though the system has taken all of it.
void a_send_ends_when_its_payload_has_arrived() {
    auto ranks = ranks_of(2);
    const auto ends = add_flows(ranks, 1);
    const Bytes small = pattern(Flows::LEAST_BYTES, 1);
    Bytes found(small.size());
    LinkTransfer send, receive;
    ranks[0].link.send(1, 1, small.data(), small.size(), send);
    ranks[1].link.receive(0, 1, found.data(), found.size(), receive);
    for (int i = 0; i < 100; ++i) ranks[0].progress();
    CHECK(!send.ended() && !ranks[0].link.flushed());
    until(ranks, [&] { return send.ended() && receive.ended(); });
    CHECK(send.state == LinkTransfer::DONE && found == small);
}

// One end of the flow has had its data, and no more than that, or not even that, when it ends.
void a_flow_that_ends_is_replaced(int progress) {
    auto ranks = ranks_of(2);
    const auto ends = add_flows(ranks, 2);
    std::deque<Sent> sent;
    for (unsigned i = 0; i < 8; ++i) sent.emplace_back(ranks, i % 2, i);
    for (int i = 0; i < progress; ++i) {
        for (Rank& rank : ranks) rank.progress();
    }
    shutdown(ends[0][progress % 2], SHUT_RDWR);
    until(ranks, [&] { return std::all_of(sent.begin(), sent.end(), [](const Sent& each) { return each.ended(); }); });
    for (const Sent& each : sent) CHECK(each.arrived());
    CHECK(ranks[0].lost[1].empty() && ranks[1].lost[0].empty());
    // A third one takes part.
    add_flows(ranks, 1);
    Sent later(ranks, 0, 9);
    until(ranks, [&] { return later.ended(); });
    CHECK(later.arrived());
}

// The connection of the pair carries what they had: also what has been canceled, and what came before its receive.
void the_last_one_ends(int progress) {
    auto ranks = ranks_of(2);
    const auto ends = add_flows(ranks, 2);
    std::deque<Sent> sent;
    for (unsigned i = 0; i < 6; ++i) sent.emplace_back(ranks, i % 2, i);
    Bytes canceled(PAYLOAD), early = pattern(PAYLOAD, 7), found(PAYLOAD);
    LinkTransfer given_up, kept, late;
    ranks[0].link.send(1, 2, canceled.data(), PAYLOAD, given_up);
    ranks[0].link.send(1, 2, early.data(), PAYLOAD, kept);
    for (int i = 0; i < progress; ++i) {
        for (Rank& rank : ranks) rank.progress();
    }
    ranks[0].link.cancel(given_up);
    canceled = {};
    for (const auto& of_flow : ends) shutdown(of_flow[progress % 2], SHUT_RDWR);
    until(ranks, [&] { return std::all_of(sent.begin(), sent.end(), [](const Sent& each) { return each.ended(); }); });
    Bytes ignored(PAYLOAD);
    LinkTransfer first;
    ranks[1].link.receive(0, 2, ignored.data(), PAYLOAD, first);
    ranks[1].link.receive(0, 2, found.data(), PAYLOAD, late);
    until(ranks, [&] { return first.ended() && late.ended() && kept.ended(); });
    for (const Sent& each : sent) CHECK(each.arrived());
    CHECK(late.state == LinkTransfer::DONE && found == early);
    CHECK(ranks[0].lost[1].empty() && ranks[1].lost[0].empty());
}

// Flows that end while nothing needs them leave the connection.
void an_idle_pair_continues_without() {
    auto ranks = ranks_of(2);
    const auto ends = add_flows(ranks, 2);
    for (const auto& of_flow : ends) shutdown(of_flow[0], SHUT_RDWR);
    for (int i = 0; i < 1000; ++i) {
        for (Rank& rank : ranks) rank.progress();
    }
    Sent sent(ranks, 0, 1);
    until(ranks, [&] { return sent.ended(); });
    CHECK(sent.arrived() && ranks[0].lost[1].empty());
}

// What has been canceled, was to be sent again, and is acknowledged meanwhile still leaves whole: the stream goes on.
void an_acknowledgement_comes_late() {
    const auto pair = connected(), flow = connected(), other = connected();
    Rank rank(0, 2);
    rank.link.begin(1, std::make_unique<ByteStream>(pair.first));
    rank.link.add_flow(1, std::make_unique<ByteStream>(flow.first));
    rank.link.add_flow(1, std::make_unique<ByteStream>(other.first));
    Bytes data = pattern(LARGE, 1);
    LinkTransfer send, next;
    rank.link.send(1, 1, data.data(), LARGE, send);
    for (int i = 0; i < 100; ++i) rank.progress();
    rank.link.cancel(send);
    std::fill(data.begin(), data.end(), UNTOUCHED);
    shutdown(flow.second, SHUT_RDWR);
    for (int i = 0; i < 1000; ++i) rank.progress();
    const uint64_t arrived[]{0, 2ull << 62};
    CHECK(write(pair.second, arrived, sizeof arrived) == sizeof arrived);
    for (int i = 0; i < 100; ++i) rank.progress();
    const Bytes small = pattern(Flows::LEAST_BYTES, 2);
    rank.link.send(1, 1, small.data(), small.size(), next);
    constexpr size_t HEADER = 16;
    Bytes found(2 * HEADER + LARGE + small.size());
    for (size_t at = 0; at < found.size();) {
        rank.progress();
        const ssize_t got = recv(other.second, found.data() + at, found.size() - at, MSG_DONTWAIT);
        if (got > 0) at += got;
    }
    const auto first = found.begin() + HEADER;
    CHECK(std::equal(first, first + LARGE, pattern(LARGE, 1).begin()));
    CHECK(std::equal(small.begin(), small.end(), first + LARGE + HEADER));
    for (const int end : {pair.second, flow.second, other.second}) close(end);
}

// Rank 0 with two flows, and the other ends of its connections.
struct Raw {
    Raw() {
        rank.link.begin(1, std::make_unique<ByteStream>(pair.first));
        rank.link.add_flow(1, std::make_unique<ByteStream>(first.first));
        rank.link.add_flow(1, std::make_unique<ByteStream>(second.first));
        rank.link.receive(1, 1, found.data(), found.size(), receive);
        const uint64_t announced[]{1, 1ull << 62 | found.size()};
        CHECK(write(pair.second, announced, sizeof announced) == sizeof announced);
    }
    ~Raw() {
        for (const int end : {pair.second, first.second, second.second}) close(end);
    }
    void begin(int end, uint32_t attempt) {
        const struct {
            uint64_t number = 0;
            uint32_t bytes, attempt;
        } header{0, uint32_t(data.size()), attempt};
        CHECK(write(end, &header, sizeof header) == sizeof header);
    }
    void progress() {
        for (int i = 0; i < 100; ++i) rank.progress();
    }

    const std::pair<int, int> pair = connected(), first = connected(), second = connected();
    Rank rank{0, 2};
    const Bytes data = pattern(Flows::LEAST_BYTES, 1);
    Bytes found = Bytes(data.size(), UNTOUCHED);
    LinkTransfer receive;
};

// A flow that had ended at the sender still delivers what it had, while another one carries that again.
void the_later_attempt_counts() {
    Raw raw;
    const Bytes other = pattern(raw.data.size(), 2);
    const size_t half = raw.data.size() / 2;
    raw.begin(raw.second.second, 1);
    CHECK(write(raw.second.second, raw.data.data(), half) == ssize_t(half));
    raw.progress();
    raw.begin(raw.first.second, 0);
    CHECK(write(raw.first.second, other.data(), other.size()) == ssize_t(other.size()));
    raw.progress();
    CHECK(!raw.receive.ended());
    CHECK(write(raw.second.second, raw.data.data() + half, half) == ssize_t(half));
    while (!raw.receive.ended()) raw.rank.progress();
    CHECK(raw.receive.state == LinkTransfer::DONE && raw.found == raw.data);
}

// Whoever owns the link then sends it later, also if no thread waits any more.
void an_acknowledgement_without_room_is_reported() {
    Raw raw;
    const Bytes small = pattern(Flows::LEAST_BYTES - 1, 3);
    std::deque<LinkTransfer> sends(200);
    for (LinkTransfer& send : sends) raw.rank.link.send(1, 2, small.data(), small.size(), send);
    raw.progress();
    CHECK(!sends.back().ended() && raw.rank.queued == 0);
    raw.begin(raw.first.second, 0);
    CHECK(write(raw.first.second, raw.data.data(), raw.data.size()) == ssize_t(raw.data.size()));
    while (!raw.receive.ended()) raw.rank.progress();
    CHECK(raw.rank.queued > 0);
    for (LinkTransfer& send : sends) raw.rank.link.cancel(send);
}

// Nobody sends such on a flow.
void garbage() {
    for (const uint64_t bytes : {uint64_t{5}, uint64_t{UINT32_MAX}}) {
        const auto pair = connected(), flow = connected(), other = connected();
        Rank rank(0, 2);
        rank.link.begin(1, std::make_unique<ByteStream>(pair.first));
        rank.link.add_flow(1, std::make_unique<ByteStream>(flow.first));
        rank.link.add_flow(1, std::make_unique<ByteStream>(other.first));
        Bytes found(Flows::LEAST_BYTES, UNTOUCHED);
        LinkTransfer receive;
        rank.link.receive(1, 1, found.data(), found.size(), receive);
        const uint64_t announced[]{1, 1ull << 62 | found.size()}, header[]{0, bytes};
        CHECK(write(flow.second, header, sizeof header) == sizeof header);
        CHECK(write(pair.second, announced, sizeof announced) == sizeof announced);
        std::byte end;
        while (recv(flow.second, &end, 1, MSG_DONTWAIT) != 0) rank.progress();  // it has closed that
        CHECK(!receive.ended() && untouched(found));
        const uint64_t right[]{0, found.size()};
        const Bytes data = pattern(found.size(), 1);
        CHECK(write(other.second, right, sizeof right) == sizeof right);
        CHECK(write(other.second, data.data(), data.size()) == ssize_t(data.size()));
        while (!receive.ended()) rank.progress();
        CHECK(receive.state == LinkTransfer::DONE && found == data);
        for (const int end_of_test : {pair.second, flow.second, other.second}) close(end_of_test);
    }
}

}  // namespace

int main() {
    a_send_ends_when_its_payload_has_arrived();
    for (int progress = 0; progress < 40; ++progress) a_flow_that_ends_is_replaced(progress);
    for (int progress = 0; progress < 60; ++progress) the_last_one_ends(progress);
    an_idle_pair_continues_without();
    an_acknowledgement_comes_late();
    the_later_attempt_counts();
    an_acknowledgement_without_room_is_reported();
    garbage();
    printf("test_flows: %d failures\n", failures.load());
    return failures != 0;
}
