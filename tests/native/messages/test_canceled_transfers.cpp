// Transfers that are canceled before, while and after they move: their memory is left alone, and what follows arrives.
#include <chrono>

#include "core/waiting.h"
#include "link/message_link.h"
#include "links.h"
#include "network/world.h"

using ringcomm::MessageLibrary, ringcomm::MessageLink, ringcomm::NetworkWorld, ringcomm::now_ns, ringcomm::SocketLink;

namespace {

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
        for (int reads = 0; reads < 3; reads += ranks[1].progress()) ranks[0].progress();
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

// Takes no receive. A send takes a call of progress() for each byte.
struct SlowMessages final : MessageLibrary {
    int send(const std::byte*, size_t bytes, int, uint64_t, uint64_t& request) override {
        request = calls + bytes;
        return 0;
    }
    int receive(std::byte*, size_t, int, uint64_t, uint64_t&) override { return 1; }
    int test(uint64_t& request, bool& done) override {
        done = calls >= request;
        return 0;
    }
    void cancel(uint64_t) override {}
    int probe(uint64_t, Probed&) override { return 0; }
    int receive_probed(std::byte*, size_t, uint64_t, uint64_t&) override { return 1; }
    std::string describe(int) const override { return "asked for a receive"; }
    bool any_thread() const override { return true; }
    bool progress() override { return ++calls, false; }
    void sleep(uint64_t) override {}
    void wake() override {}

    uint64_t calls = 0;  // of progress()
};

// The library may read their memory until they end, for which it gets a second.
void canceled_sends_of_a_slow_library() {
    constexpr uint64_t SECOND = 1'000'000'000;
    constexpr size_t SOON = 5, NEVER = SIZE_MAX / 2;  // few: on a busy machine each call may take a time slice
    auto library = std::make_unique<SlowMessages>();
    SlowMessages& messages = *library;
    MessageLink link(0, 2, std::move(library));
    const std::byte data{};
    const auto cancel_send = [&](size_t bytes) {
        LinkTransfer transfer;
        link.send(1, 1, &data, bytes, transfer);
        link.cancel(transfer);
        CHECK(transfer.state == LinkTransfer::FAILED);
    };
    const uint64_t begun = now_ns();
    cancel_send(SOON);
    CHECK(messages.calls >= SOON && !link.stuck());
    cancel_send(NEVER);
    CHECK(now_ns() - begun >= SECOND && link.stuck());

    bool in_a_row = false;  // then it has no second of its own; a thread that was preempted may come too late for that
    for (int i = 0; i < 10 && !in_a_row; ++i) {
        const uint64_t calls = messages.calls;
        cancel_send(NEVER);
        in_a_row = messages.calls == calls + 1;
    }
    CHECK(in_a_row);

    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const uint64_t calls = messages.calls;
    cancel_send(SOON);  // of another failed call
    CHECK(messages.calls >= calls + SOON);

    messages.calls = SIZE_MAX - 1;  // all end: else the link would leave their memory to the library
    Rank events(0, 2, {-1, -1});
    CHECK(link.progress(events) && !link.stuck());
}

// What came for it was discarded, so it would get what comes later.
void receives_of_a_dropped_tag() {
    MessageLink link(0, 2, std::make_unique<SlowMessages>());
    Rank events(0, 2, {-1, -1});
    LinkTransfer receive;
    std::byte data{};
    link.drop(1);
    link.receive(1, 1, &data, 1, receive);
    CHECK(receive.state == LinkTransfer::FAILED);
    CHECK(!link.progress(events) && events.lost[1].empty());
}

// Between its calls a rank discards what the others still send for a failed one: they cannot end it by themselves.
void dropped_messages_move_while_no_thread_waits() {
    auto library = std::make_unique<SlowMessages>();
    const SlowMessages& messages = *library;
    NetworkWorld world(std::make_unique<MessageLink>(0, 2, std::move(library)));
    const std::lock_guard lock(world.mutex);
    world.drop(1);
    for (uint64_t calls = 0; calls < 3;) {
        world.mutex.unlock();
        std::this_thread::yield();
        world.mutex.lock();
        calls = messages.calls;
    }
}

}  // namespace

int main() {
    canceled_receives();
    canceled_sends();
    canceled_sends_of_a_slow_library();
    receives_of_a_dropped_tag();
    dropped_messages_move_while_no_thread_waits();
    printf("test_canceled_transfers: %d failures\n", failures.load());
    return failures != 0;
}
