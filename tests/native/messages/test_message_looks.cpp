// At whose rings a rank looks for messages: in a group of 64 ranks a call looks at the peer that it concerns and at few
// others, and yet everything that comes is read in the end.
#include <deque>
#include <numeric>

#include "p2p/engine.h"
#include "world.h"

using namespace ringcomm;

namespace {

constexpr int RANKS = 64;

// What a peer has sent; `looks` counts how often the engine has asked for it.
struct Inbox {
    std::deque<PacketHeader> packets;
    int looks = 0;
};

class InboxChannel final : public PacketChannel {
public:
    explicit InboxChannel(Inbox& inbox) : PacketChannel(1 << 10, 1 << 10), inbox_(inbox) {}

    bool try_write(const PacketHeader&, const std::byte*) override { return true; }
    ReceivedPacket next() override {
        ++inbox_.looks;
        if (inbox_.packets.empty()) return {};
        return {&inbox_.packets.front(), nullptr};
    }
    bool consume() override {
        inbox_.packets.pop_front();
        return false;
    }

private:
    Inbox& inbox_;
};

struct NoSleep final : Sleeper {
    uint32_t announce() override { return 0; }
    void sleep(uint32_t, uint64_t) override {}
    void retract() override {}
    void wake() override {}
};

// Rank 0 of a group whose peers are inboxes. Nothing fails there.
class InboxGroup final : public PeerGroup {
public:
    InboxGroup() : PeerGroup(0, RANKS, small_tuning(), record_, std::make_shared<Drains>()), inboxes(RANKS) {}

    void check_failure() const override {}
    bool has_failed() const override { return false; }
    void store_failure(const Failure&) override {}
    bool closed(int) const override { return false; }
    void run_collective(const CallRecord&) override {}
    int member(int r) const override { return r; }
    std::unique_ptr<PacketChannel> open_channel(int peer) override {
        return std::make_unique<InboxChannel>(inboxes[peer]);
    }
    Sleeper& sleeper() override { return sleeper_; }
    uint64_t id() const override { return 1; }
    RankReport report(int r, int) const override { return {r, "", -1, {}}; }
    void finish_closing() override {}

    void receive_from(int peer, int64_t tag) {
        inboxes[peer].packets.push_back({PACKET_EAGER, RC_UINT8, tag, 0, 0, 0});
    }
    int looks() const {
        return std::accumulate(inboxes.begin(), inboxes.end(), 0,
                               [](int sum, const Inbox& each) { return sum + each.looks; });
    }

    std::vector<Inbox> inboxes;

protected:
    std::string how_it_ended(int) override { return {}; }

private:
    FlightRecord record_{};
    NoSleep sleeper_;
};

rc_transfer empty(int kind, int peer, int64_t tag) { return transfer_of(kind, nullptr, 0, RC_UINT8, peer, tag); }

void receives_look_where_they_receive(InboxGroup& group, PointToPointEngine& engine) {
    for (const int peer : {5, 63, 1}) {
        const int before = group.looks();
        group.receive_from(peer, 0);
        CHECK(engine.run(empty(RC_RECV, peer, 0)).source == peer);
        CHECK(group.looks() - before <= 4);
    }
    const int before = group.looks();
    const auto received = engine.start(empty(RC_RECV, 9, 0));
    for (int i = 0; i < 10; ++i) engine.run(empty(RC_SEND, 5, 0));
    CHECK(group.looks() - before <= 20 && !received->done());
    group.receive_from(9, 0);
    engine.run(empty(RC_SEND, 5, 0));
    CHECK(received->done());
}

void any_source_looks_everywhere(InboxGroup& group, PointToPointEngine& engine) {
    group.receive_from(40, 0);
    CHECK(engine.run(empty(RC_RECV_MESSAGE, -1, 0)).source == 40);
    group.receive_from(41, 0);
    const auto probed = engine.poll(empty(RC_PROBE, -1, 0));
    CHECK(probed && probed->source == 41);
    engine.run(empty(RC_RECV, 41, 0));
}

// A peer that nobody expects to send may have filled its ring, and wait.
void others_have_their_turn(InboxGroup& group, PointToPointEngine& engine) {
    for (int peer = 1; peer < RANKS; ++peer) group.receive_from(peer, 7);
    for (int i = 1; i < RANKS; ++i) engine.run(empty(RC_SEND, 5, 0));
    for (int peer = 1; peer < RANKS; ++peer) CHECK(group.inboxes[peer].packets.empty());
    for (int peer = 1; peer < RANKS; ++peer) engine.run(empty(RC_RECV, peer, 7));
}

}  // namespace

int main() {
    InboxGroup group;
    PointToPointEngine engine(group);
    receives_look_where_they_receive(group, engine);
    any_source_looks_everywhere(group, engine);
    others_have_their_turn(group, engine);
    return failures.load() != 0;
}
