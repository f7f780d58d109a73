// Communicators between hosts that fail: different calls, aborts, ranks that leave, are lost or late. Meant for the
// sanitizers: no memory is accessed after a call has returned, and every call returns.
#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "network/group.h"
#include "network_group.h"

namespace {

void different_calls_leave_outputs_untouched(NetworkRank& at) {
    for (int odd = 0; odd < at.size; ++odd) {
        const bool other = at.rank == odd;
        std::vector<int> x(1000, 1), y(1000, UNTOUCHED);
        const auto check = [&](int status) {
            const std::string text = message_of(status, RC_MISMATCH);
            CHECK(text.find("  rank " + std::to_string(odd) + ": ") != std::string::npos);
            CHECK(std::count(y.begin(), y.end(), UNTOUCHED) == 1000);
            check_usable(at);
        };
        check(run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), 5 + other));
        check(run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), 5, RC_INT32, other ? RC_MAX : RC_SUM));
        check(run(at.comm, other ? RC_REDUCE : RC_ALL_REDUCE, x.data(), y.data(), 5));
        check(run(at.comm, RC_ALL_GATHER, x.data(), y.data(), 3, other ? RC_FLOAT32 : RC_INT32));
    }
}

// Each rank is the root of its own broadcast: the data of every host comes, more than anybody expects.
void every_rank_calls_something_else(NetworkRank& at) {
    std::vector<int> x(90, at.rank);
    message_of(run(at.comm, RC_BROADCAST, x.data(), x.data(), 90, RC_INT32, RC_SUM, at.rank), RC_MISMATCH);
    CHECK(std::count(x.begin(), x.end(), at.rank) == 90);
    check_usable(at);
}

void large_calls_mismatch_too(NetworkRank& at) {
    const std::vector<int> x(LARGE - 1, 1);
    std::vector<int> y(LARGE - 1, UNTOUCHED);
    add_sum(at, LARGE - 1, x.data(), y.data());
    const uint64_t count = at.rank == at.size - 1 ? 4 : LARGE - 1;
    message_of(run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), count), RC_MISMATCH);
    CHECK(std::count(y.begin(), y.end(), UNTOUCHED) == int(LARGE - 1));
    check_usable(at);
}

void a_failure_reaches_every_rank(NetworkRank& at) {
    std::vector<int> x(5000);
    if (at.rank == at.size - 1) {
        DO(rc_abort(at.comm, RC_ABORTED, at.rank, "the data is wrong"));
    } else if (at.rank % 2) {
        message_of(run(at.comm, transfer_of(RC_RECV, x.data(), 5000, RC_INT32, -1, 0)), RC_ABORTED);
    } else {
        message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_ABORTED);
    }
    const std::string text = message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_ABORTED);
    CHECK(text.find("the data is wrong") != std::string::npos && rc_last_error()->rank == at.size - 1);
}

// The abort comes at any moment of the transfers; their memory ends with the call.
void an_abort_in_large_calls(NetworkRank& at) {
    const rc_tuning tuning = small_tuning();
    const std::vector<int> members = numbers(2, 0);
    for (uint64_t turn = 0; turn < 12; ++turn) {
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
        rc_comm* group;
        DO(rc_network_group(at.network, 100 + turn, at.rank, 2, members.data(), members.data(), nullptr, nullptr,
                            &tuning, &group));
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
        std::thread aborting([&] {
            if (at.rank == int(turn % 2)) {
                std::this_thread::sleep_for(std::chrono::microseconds(200 * turn));
                DO(rc_abort(group, RC_ABORTED, at.rank, "enough"));
            }
        });
        std::thread sending([&] {
            for (int status = RC_OK; status != RC_ABORTED;) {
                const std::vector<int> sent(1'000'000, 1);
                std::vector<int> received(1'000'000);
                status = exchange(group, transfer_of(RC_SEND, sent.data(), sent.size(), RC_INT32, 1 - at.rank, 0),
                                  transfer_of(RC_RECV, received.data(), received.size(), RC_INT32, 1 - at.rank, 0));
                CHECK(status == RC_OK || status == RC_ABORTED);
            }
        });
        for (int status = RC_OK; status != RC_ABORTED;) {
            const std::vector<int> x(LARGE - 1, 1);
            std::vector<int> y(LARGE - 1);
            if (status == RC_OK) {
                const rc_call call{x.data(), y.data(), LARGE - 1, RC_INT32, RC_SUM, 1.0, 0, nullptr, nullptr};
                const rc_block in = block(RC_MEMORY_IN, 0, LARGE - 1), out = block(RC_MEMORY_OUT, 0, LARGE - 1);
                const rc_step step = exchange(1 - at.rank, in, out, in);
                const int added = rc_add_program(group, RC_ALL_REDUCE, &call, 0, 0, &step, 1);
                CHECK(added == RC_OK);
                status = run(group, RC_ALL_REDUCE, x.data(), y.data(), LARGE - 1);
            }
            CHECK(status == RC_OK || status == RC_ABORTED);
        }
        aborting.join();
        sending.join();
        rc_free(group);
    }
}

void a_rank_that_leaves_is_named(NetworkRank& at) {
    check_usable(at);
    at.all->arrive_and_wait();  // the failure of a faster rank's next call would end this one
    if (at.rank == 1) return;   // its communicator is closed next
    std::vector<int> x(10);
    const std::string text = message_of(run(at.comm, RC_ALL_REDUCE, x.data(), x.data(), 10), RC_PEER_LOST);
    CHECK(rc_last_error()->rank == 1 && text.find("rank 1") != std::string::npos);
    message_of(run(at.comm, transfer_of(RC_RECV, x.data(), 10, RC_INT32, 1, 0)), RC_PEER_LOST);
}

void what_a_rank_sent_before_it_left_arrives(NetworkRank& at) {
    std::vector<int> x = numbers(5000, 3), y(5000);
    if (at.rank == 1) {
        for (int r = 0; r < at.size; ++r) {
            if (r != 1) DO(run(at.comm, transfer_of(RC_SEND, x.data(), 5000, RC_INT32, r, 0)));
        }
        return;
    }
    DO(run(at.comm, transfer_of(RC_RECV, y.data(), 5000, RC_INT32, 1, 0)));
    CHECK(x == y);
}

void a_lost_peer_is_named(NetworkRank& at) {
    std::vector<int> x(LARGE - 1), y(LARGE - 1);
    if (at.size == 2) add_sum(at, LARGE - 1, x.data(), y.data());
    if (at.rank == 1) {
        for (const int socket : at.sockets) {
            if (socket >= 0) shutdown(socket, SHUT_RDWR);
        }
        return;
    }
    int status = RC_OK;
    for (int turn = 0; turn < 3 && !status; ++turn) {
        status = run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), at.size == 2 ? LARGE - 1 : 5);
    }
    const std::string text = message_of(status, RC_PEER_LOST);
    CHECK(rc_last_error()->rank == 1 && text.find("rank 1 was lost") != std::string::npos);
}

// Rank 0 has the only deadline, and begins when it sees the others in the call.
void a_timeout_names_the_late_rank(NetworkRank& at) {
    if (at.rank == 1) {
        int status = RC_OK;
        while (!status) status = rc_check(at.comm);
        message_of(status, RC_TIMEOUT);
        return;
    }
    for (int r = 2; at.rank == 0 && r < at.size;) {
        char report[10'000];
        DO(rc_report(at.comm, 1, report, sizeof report));
        r += std::string(report).find("rank " + std::to_string(r) + ": all_reduce") != std::string::npos;
    }
    std::vector<int> x(10);
    const rc_call call{x.data(), x.data(), 10, RC_INT32, RC_SUM, 1.0, 0, nullptr, nullptr};
    const int status = rc_collective(at.comm, RC_ALL_REDUCE, &call, at.rank ? -1 : 0.3, nullptr);
    const std::string text = message_of(status, RC_TIMEOUT);
    CHECK(rc_last_error()->rank == 1 && text.find("it was not called by rank 1") != std::string::npos);
}

void a_message_that_never_comes_is_a_timeout(NetworkRank& at) {
    std::vector<int> x(100'000);
    if (at.rank == 0) {
        message_of(run(at.comm, transfer_of(RC_SEND, x.data(), x.size(), RC_INT32, 1, 0)), RC_TIMEOUT);
    } else {
        int status = RC_OK;
        while (!status) status = rc_check(at.comm);
        message_of(status, RC_TIMEOUT);
    }
}

// The others notice that this rank has closed, and tell it before its own waits end.
bool ended_by_closing(int status) { return status == RC_CLOSED || status == RC_PEER_LOST; }

void closing_wakes_the_waiters_of_this_rank(NetworkRank& at) {
    if (at.rank != 0) {
        message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_PEER_LOST);
        return;
    }
    std::vector<int> x(10);
    rc_work* received;
    DO(start(at.comm, transfer_of(RC_RECV, x.data(), 10, RC_INT32, 1, 0), &received));
    std::thread waiter([&] {
        std::vector<int> y(10);
        CHECK(ended_by_closing(run(at.comm, transfer_of(RC_RECV, y.data(), 10, RC_INT32, -1, 1))));
    });
    DO(rc_close(at.comm));
    waiter.join();
    CHECK(ended_by_closing(finish(received)));
}

void closing_ends_a_wait_inside_the_host(NetworkRank& at) {
    if (at.rank == 3) {
        rc_work* waiting;
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0, RC_INT32, RC_SUM, 0, nullptr, &waiting));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // now it needs rank 2, in the memory of its host
        DO(rc_close(at.comm));
        message_of(finish(waiting), RC_CLOSED);
        CHECK(rc_last_error()->rank == 3);
    }
    at.all->arrive_and_wait();
    if (at.rank == 3) return;
    const int met = run(at.comm, RC_BARRIER, nullptr, nullptr, 0);
    CHECK(met == RC_OK || met == RC_PEER_LOST);  // rank 3 may have come before it closed
}

// In a group that the dead rank is not in, which hears of it by the memory of a host: from the last rank of the second
// host, whose number there means another rank of the group, or none. Its other ranks hear by the link.
void a_death_in_another_group_has_its_number_in_the_parent(NetworkRank& at) {
    rc_tuning tuning = small_tuning();
    const int hosts = at.size % 3 ? 2 : 3, lost = at.size - hosts + 1;
    const int host = at.rank % hosts, here = at.rank / hosts;
    const int members_here[]{0, 1};
    const bool joins = here < 2;
    uint64_t offset = 0;
    if (here == 0) DO(rc_reserve(at.local, rc_sub_bytes(2, &tuning), &offset));
    DO(run(at.local, RC_BROADCAST, &offset, &offset, sizeof offset, RC_UINT8));
    rc_comm *local = nullptr, *group = nullptr;
    if (joins) {
        DO(rc_sub_open(at.local, offset, here, 2, members_here, &local));
        const std::vector<int> members = numbers(2 * hosts, 0);  // the ranks come host by host
        std::vector<int> places;
        for (const int member : members) places.push_back(member % hosts);
        DO(rc_network_group(at.network, 2, at.rank, 2 * hosts, members.data(), places.data(), local, at.comm, &tuning,
                            &group));
    }
    const int met = run(at.comm, RC_BARRIER, nullptr, nullptr, 0);
    CHECK(met == RC_OK || met == RC_PEER_LOST);  // all have the group; a slower rank may hear of the death here
    const auto check = [&](int status, int of) {
        const std::string text = message_of(status, RC_PEER_LOST);
        CHECK(rc_last_error()->rank == lost && rc_last_error()->group_size == of);
        CHECK(text.find("rank " + std::to_string(lost)) != std::string::npos);
        const bool of_parent =
            text.find(std::to_string(at.size) + " ranks that this one was split") != std::string::npos;
        CHECK(of_parent == (of > 0));
    };
    if (host == 1 && here == 2) DO(rc_abort(at.local, RC_PEER_LOST, at.size / hosts - 1, "gone"));
    if (joins) {
        int status = RC_OK;
        while (!status) status = run(group, RC_BARRIER, nullptr, nullptr, 0);
        check(status, at.size);
        check(run(group, RC_BARRIER, nullptr, nullptr, 0), at.size);
        check(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), 0);
        rc_free(group);
        rc_free(local);
    } else {
        int status = RC_OK;
        while (!status) status = rc_check(at.comm);
        check(status, 0);
    }
}

// As when nobody can make connections any more.
void a_network_that_fails_names_its_rank(NetworkRank& at) {
    if (at.rank == 1) DO(rc_network_fail(at.network, "has no descriptor left"));
    const std::string text = message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_SYSTEM);
    CHECK(rc_last_error()->rank == 1 && text.find("rank 1 has no descriptor left") != std::string::npos);
}

// What the two ranks of a link have sent each other.
struct Mailboxes {
    std::mutex mutex;
    std::deque<std::vector<std::byte>> to[2];
};

// Only packets, and none with what rank 1 records of a call, as if it took another way through a slow network.
struct LinkWithoutRecords final : ringcomm::Link {
    LinkWithoutRecords(int rank, Mailboxes& mailboxes) : Link(rank, 2), mailboxes(mailboxes) {}

    void send(int, uint64_t, const std::byte*, size_t, ringcomm::LinkTransfer&) override {}
    void receive(int, uint64_t, std::byte*, size_t, ringcomm::LinkTransfer&) override {}
    void cancel(ringcomm::LinkTransfer&) override {}
    void drop(uint64_t) override {}
    void send_packet(int peer, std::span<const std::byte> packet) override {
        const auto head = ringcomm::PacketReader(packet).next<ringcomm::PacketHead>();
        if (rank == 1 && head.type == ringcomm::PacketType::RECORDS) return;
        const std::lock_guard lock(mailboxes.mutex);
        mailboxes.to[peer].emplace_back(packet.begin(), packet.end());
    }
    bool has_room(int) const override { return true; }
    bool progress(ringcomm::LinkEvents& events) override {
        std::deque<std::vector<std::byte>> arrived;
        {
            const std::lock_guard lock(mailboxes.mutex);
            arrived.swap(mailboxes.to[rank]);
        }
        for (const auto& packet : arrived) events.packet_arrived(1 - rank, packet);
        return !arrived.empty();
    }
    void sleep(uint64_t) override { std::this_thread::yield(); }
    void wake() override {}
    bool flushed() const override { return true; }
    void after_fork() override {}

    Mailboxes& mailboxes;
};

// Rank 1 finds it, and aborts; rank 0 hears of that first.
void an_abort_by_a_mismatch_shows_it_before_the_records_come() {
    Mailboxes mailboxes;
    const auto differ = [&](int rank) {
        const auto world =
            std::make_shared<ringcomm::NetworkWorld>(std::make_unique<LinkWithoutRecords>(rank, mailboxes));
        ringcomm::NetworkGroup group(
            world, {1, {0, 1}, rank, {{{0}, {1}}, rank, 0}, {.flight = std::make_shared<ringcomm::FlightRecord>()}, {}},
            small_tuning());
        ringcomm::CollectiveQueue collectives(group);
        std::vector<int> x(3);
        auto* const data = reinterpret_cast<std::byte*>(x.data());
        ringcomm::CallRecord call{RC_ALL_REDUCE, data, data, 3, RC_INT32, rank ? RC_MAX : RC_SUM, 1.0, 0, nullptr, 60};
        call.item = sizeof(int);
        try {
            collectives.run(call);
            CHECK(false);
        } catch (const ringcomm::Failure& failure) {
            const rc_error& error = failure.error;
            const std::string text = error.message, own = rank ? "max" : "sum";
            CHECK(error.code == RC_MISMATCH && error.rank == 1 - rank && error.epoch == 1 && !error.group_size);
            CHECK(error.collective == RC_ALL_REDUCE && std::count(text.begin(), text.end(), '\n') == 2);
            CHECK(std::string(error.expected) == "all_reduce(int32 x 3, " + own + ")" &&
                  std::string(error.got) == "all_reduce(int32 x 3, " + std::string(rank ? "sum" : "max") + ")");
            const std::string reason = "rank 1 aborted: MismatchError: " + text;
            if (rank == 1) group.store_failure(ringcomm::Failure(RC_ABORTED, reason, rank));
        }
    };
    std::thread first(differ, 0), second(differ, 1);
    first.join();
    second.join();
}

// Not connected, or never flushed.
struct SilentLink final : ringcomm::Link {
    SilentLink() : Link(0, 3) {}

    void send(int, uint64_t, const std::byte*, size_t, ringcomm::LinkTransfer&) override {}
    void receive(int, uint64_t, std::byte*, size_t, ringcomm::LinkTransfer&) override {}
    void cancel(ringcomm::LinkTransfer&) override {}
    void drop(uint64_t) override {}
    void send_packet(int peer, std::span<const std::byte>) override { ++sent[peer]; }
    bool has_room(int) const override { return true; }
    bool connected(int) const override { return false; }
    bool progress(ringcomm::LinkEvents&) override { return false; }
    void sleep(uint64_t) override { std::this_thread::yield(); }
    void wake() override {}
    bool flushed() const override { return ++looks, false; }
    void after_fork() override {}

    int sent[3]{};
    mutable int looks = 0;
};

// Each process hears once of the last 1,000 groups that this one has left before they were connected.
void what_is_kept_of_groups_that_were_left_is_bounded() {
    auto owned = std::make_unique<SilentLink>();
    SilentLink& link = *owned;
    ringcomm::NetworkWorld world(std::move(owned));
    for (uint64_t group = 0; group < 1100; ++group) {
        const ringcomm::PacketWriter closed({group, ringcomm::PacketType::CLOSED, 0});
        world.remove(group, {closed}, group % 2 ? std::vector{1, 2} : std::vector{1});
    }
    const std::unique_lock lock(world.mutex);
    for (int i = 0; i < 2; ++i) {
        for (const int process : {1, 2}) world.connected(process);
    }
    CHECK(link.sent[1] == 1000 && link.sent[2] == 500);
}

void a_network_waits_once_for_what_was_sent() {
    auto owned = std::make_unique<SilentLink>();
    SilentLink& link = *owned;
    ringcomm::NetworkWorld world(std::move(owned));
    world.flush();
    const int looks = link.looks;
    CHECK(looks > 0);
    world.flush();
    CHECK(link.looks == looks);
}

// The communicator of the host goes first, as the collector of a program may have it.
void a_host_that_is_closed_first(NetworkRank& at) {
    std::vector<int> x(5), y(5);
    rc_work* work;
    const int begun = run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), 5, RC_INT32, RC_SUM, 0, nullptr, &work);
    rc_free(std::exchange(at.local, nullptr));
    const int status = begun ? begun : finish(work);
    // A faster rank may have left, or aborted, before this one began.
    CHECK(status == RC_OK || status == RC_CLOSED || status == RC_PEER_LOST || status == RC_ABORTED);
    rc_abort(at.comm, RC_ABORTED, at.rank, "enough");
}

}  // namespace

int main() {
    const rc_tuning tuning = small_tuning();
    for (const char* layout : LAYOUTS) {
        on({layout}, tuning,
           {different_calls_leave_outputs_untouched, every_rank_calls_something_else, a_failure_reaches_every_rank,
            a_rank_that_leaves_is_named, what_a_rank_sent_before_it_left_arrives,
            closing_wakes_the_waiters_of_this_rank, a_timeout_names_the_late_rank});
    }
    on({"01", "0011", "01012"}, tuning,
       {different_calls_leave_outputs_untouched, a_failure_reaches_every_rank, a_rank_that_leaves_is_named,
        what_a_rank_sent_before_it_left_arrives, closing_wakes_the_waiters_of_this_rank, a_timeout_names_the_late_rank},
       Connected::WHEN_NEEDED);
    on({"01", "0011"}, tuning,
       {large_calls_mismatch_too, a_host_that_is_closed_first, a_network_that_fails_names_its_rank});
    on({"0011"}, tuning, {closing_ends_a_wait_inside_the_host});
    on({"01", "012"}, tuning, {a_lost_peer_is_named});
    on({"01", "012"}, impatient(), {a_message_that_never_comes_is_a_timeout});
    on({"01010101", "012012012012"}, tuning, {a_death_in_another_group_has_its_number_in_the_parent});
    on({"01"}, tuning, {an_abort_in_large_calls});
    on({"0123456789abcdefghij"}, tuning, {every_rank_calls_something_else});
    an_abort_by_a_mismatch_shows_it_before_the_records_come();
    what_is_kept_of_groups_that_were_left_is_bounded();
    a_network_waits_once_for_what_was_sent();
    return failures > 0;
}
