// Communicators between hosts, over TCP connections on this machine: small calls, programs, messages and groups. Meant
// for the sanitizers.
#include <algorithm>

#include "network_group.h"

namespace {

int path_of(rc_comm* comm) {
    int path;
    uint64_t number;
    DO(rc_last_path(comm, &path, &number));
    return path;
}

// --- Values ----------------------------------------------------------------------------------------------------------

void small_calls_are_one_shot(NetworkRank& at) {
    const int n = at.size, me = at.rank;
    for (int turn = 0; turn < 20; ++turn) {
        const int root = turn % n;
        std::vector<int> x = numbers(turn, me), all(turn * n), mine(turn);
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
        DO(run(at.comm, RC_ALL_REDUCE, x.data(), mine.data(), turn));
        CHECK(path_of(at.comm) == RC_PATH_ONE_SHOT);
        CHECK(is_sum(mine, n) && x == numbers(turn, me));
        DO(run(at.comm, RC_ALL_GATHER, x.data(), all.data(), turn));
        for (int r = 0; r < n; ++r)
            CHECK(std::equal(all.begin() + r * turn, all.begin() + (r + 1) * turn, numbers(turn, r).begin()));
        std::vector<int> of_root = numbers(turn, me);
        DO(run(at.comm, RC_BROADCAST, of_root.data(), of_root.data(), turn, RC_INT32, RC_SUM, root));
        CHECK(of_root == numbers(turn, root));
        DO(run(at.comm, RC_SCATTER, me == root ? all.data() : nullptr, mine.data(), turn, RC_INT32, RC_SUM, root));
        CHECK(mine == numbers(turn, me));
        std::vector<int> swapped(n, UNTOUCHED);
        DO(run(at.comm, RC_ALL_TO_ALL, numbers(n, 10 * me).data(), swapped.data(), 1));
        for (int r = 0; r < n; ++r) CHECK(swapped[r] == 10 * r + me);
        DO(run(at.comm, RC_ALL_REDUCE, x.data(), x.data(), turn, RC_INT32, RC_MAX));
        CHECK(x == numbers(turn, n - 1));
    }
}

void large_calls_run_their_program(NetworkRank& at) {
    for (const uint64_t count : {uint64_t{65536}, uint64_t{65538}, LARGE - 1}) {
        const std::vector<int> x = numbers(count, at.rank);
        std::vector<int> sum(count);
        CHECK(run(at.comm, RC_ALL_REDUCE, x.data(), sum.data(), count) == RC_ARGUMENT);
        add_sum(at, count, x.data(), sum.data());
        for (int turn = 0; turn < 5; ++turn) {
            std::fill(sum.begin(), sum.end(), UNTOUCHED);
            DO(run(at.comm, RC_ALL_REDUCE, x.data(), sum.data(), count));
            CHECK(is_sum(sum, at.size) && x == numbers(count, at.rank));
        }
        CHECK(path_of(at.comm) == RC_PATH_PROGRAM);
    }
}

void queued_calls_run_in_order(NetworkRank& at) {
    const std::vector<int> x = numbers(LARGE - 1, at.rank);
    std::vector<std::vector<int>> sums(10, std::vector<int>(LARGE - 1));
    add_sum(at, LARGE - 1, x.data(), sums[0].data());
    std::vector<rc_work*> works(10);
    for (size_t i = 0; i < works.size(); ++i) {
        sums[i].resize(i % 2 ? 5 : LARGE - 1);
        DO(run(at.comm, RC_ALL_REDUCE, x.data(), sums[i].data(), sums[i].size(), RC_INT32, RC_SUM, 0, nullptr,
               &works[i]));
    }
    for (size_t i = works.size(); i-- > 0;) {
        DO(finish(works[i]));
        CHECK(is_sum(sums[i], at.size));
    }
}

// --- Messages --------------------------------------------------------------------------------------------------------

void send_around(NetworkRank& at, std::initializer_list<size_t> counts) {
    const int n = at.size, right = (at.rank + 1) % n, left = (at.rank + n - 1) % n;
    for (const size_t count : counts) {
        const std::vector<int> x = numbers(count, at.rank);
        std::vector<int> y(count, UNTOUCHED), z(count, UNTOUCHED);
        rc_work *sent, *received;
        int source;
        DO(start(at.comm, transfer_of(RC_RECV, z.data(), count, RC_INT32, -1, 7), &received));
        DO(start(at.comm, transfer_of(RC_SEND, x.data(), count, RC_INT32, right, 7), &sent));
        DO(exchange(at.comm, transfer_of(RC_SEND, x.data(), count, RC_INT32, right, 0),
                    transfer_of(RC_RECV, y.data(), count, RC_INT32, left, 0), &source));
        CHECK(source == left && y == numbers(count, left));
        DO(rc_work_wait(received, -1, &source));
        CHECK(source == left && z == numbers(count, left));
        rc_work_free(received);
        DO(finish(sent));
    }
}

// Around 64 KiB, which are eager between hosts.
void messages_of_every_length_arrive(NetworkRank& at) { send_around(at, {0, 1, 16'384, 16'385, 40'000}); }

// Of 4 MiB each. Inside a host so much would pass the small ring in 9,600 packets.
void messages_of_several_pulls_arrive(NetworkRank& at) { send_around(at, {1'200'000}); }

void many_messages_are_open(NetworkRank& at) {
    const int peer = (at.rank + 1) % at.size, from = (at.rank + at.size - 1) % at.size;
    std::vector<std::vector<int>> sent, received;
    std::vector<rc_work*> works;
    for (int i = 0; i < 300; ++i) {
        sent.push_back(numbers(i % 10 ? 3 : 18'000, 100 * at.rank + i));
        received.emplace_back(sent.back().size());
    }
    for (int i = 0; i < 300; ++i) {
        DO(start(at.comm, transfer_of(RC_SEND, sent[i].data(), sent[i].size(), RC_INT32, peer, i % 7),
                 &works.emplace_back()));
    }
    for (int i = 0; i < 300; ++i) {
        DO(start(at.comm, transfer_of(RC_RECV, received[i].data(), received[i].size(), RC_INT32, from, i % 7),
                 &works.emplace_back()));
    }
    for (size_t i = works.size(); i-- > 0;) DO(finish(works[i]));
    for (int i = 0; i < 300; ++i) CHECK(received[i] == numbers(received[i].size(), 100 * from + i));
}

// They travel in the memory of the host, whose communicator has none of its own any more.
void messages_inside_a_host_have_one_channel(NetworkRank& at) {
    int x = 0;
    message_of(run(at.local, transfer_of(RC_SEND, &x, 1, RC_INT32, (at.rank + 1) % 2, 0)), RC_ARGUMENT);
}

// Several threads of each rank in messages, one in collectives.
void messages_run_beside_collectives(NetworkRank& at) {
    const int peer = at.rank ^ 1;
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 3; ++tag) {
        threads.emplace_back([&, tag] {
            for (int turn = 0; turn < 30; ++turn) {
                const std::vector<int> x = numbers(turn % 3 ? 20 : 30'000, at.rank + turn);
                std::vector<int> y(x.size());
                DO(exchange(at.comm, transfer_of(RC_SEND, x.data(), x.size(), RC_INT32, peer, tag),
                            transfer_of(RC_RECV, y.data(), y.size(), RC_INT32, peer, tag)));
                CHECK(y == numbers(y.size(), peer + turn));
            }
        });
    }
    for (int turn = 0; turn < 100; ++turn) {
        int sum = 0, mine = at.rank;
        DO(run(at.comm, RC_ALL_REDUCE, &mine, &sum, 1));
        CHECK(sum == at.size * (at.size - 1) / 2);
    }
    for (auto& thread : threads) thread.join();
}

// --- Groups ----------------------------------------------------------------------------------------------------------

// Rank 0 has the highest number in the second group.
void two_threads_use_two_groups(NetworkRank& at) {
    rc_comm* groups[2];
    const rc_tuning tuning = small_tuning();
    for (int i = 0; i < 2; ++i) {
        std::vector<int> members = numbers(at.size, 0), hosts = numbers(at.size, 0);
        if (i) std::reverse(members.begin(), members.end());
        DO(rc_network_group(at.network, 9 - i, i ? at.size - 1 - at.rank : at.rank, at.size, members.data(),
                            hosts.data(), nullptr, at.comm, &tuning, &groups[i]));
    }
    DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&, i] {
            const std::vector<int> x = numbers(LARGE - 1, i + (i ? at.size - 1 - at.rank : at.rank));
            std::vector<int> sum(x.size());
            if (at.size == 2)
                add_sum({.rank = i ? 1 - at.rank : at.rank, .size = 2, .comm = groups[i]}, x.size(), x.data(),
                        sum.data());
            for (int turn = 0; turn < 50; ++turn) {
                sum.resize(turn % 10 || at.size > 2 ? 100 : LARGE - 1);
                DO(run(groups[i], RC_ALL_REDUCE, x.data(), sum.data(), sum.size()));
                for (int& each : sum) each -= i * at.size;
                CHECK(is_sum(sum, at.size));
            }
            DO(rc_close(groups[i]));
        });
    }
    for (auto& thread : threads) thread.join();
    for (rc_comm* group : groups) rc_free(group);
    DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
}

// Rank 1 waits in its rail for rank 3, which waits for a message of rank 2, which waits in its rail for rank 0, whose
// messages fill the ring to rank 1.
void messages_move_while_a_rank_waits_in_a_rail(NetworkRank& at) {
    const int rail = at.rank % 2, here = at.rank / 2;
    const int members[]{rail, rail + 2}, hosts[]{0, 1};
    const rc_tuning tuning = small_tuning();
    rc_comm* group;
    DO(rc_network_group(at.network, 2 + rail, here, 2, members, hosts, nullptr, at.comm, &tuning, &group));
    DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
    std::vector<int> x(1500, at.rank);  // too long to be buffered, too short to wait for its receive
    const auto send = [&](int to) { DO(run(at.comm, transfer_of(RC_SEND, x.data(), x.size(), RC_INT32, to, 0))); };
    const auto receive = [&](int from) {
        DO(run(at.comm, transfer_of(RC_RECV, x.data(), x.size(), RC_INT32, from, 0)));
        CHECK(x[0] == from);
    };
    const int many = 100;
    for (int i = 0; at.rank == 0 && i < many; ++i) send(1);
    if (at.rank == 3) receive(2);
    DO(run(group, RC_BARRIER, nullptr, nullptr, 0));
    if (at.rank == 2) send(3);
    for (int i = 0; at.rank == 1 && i < many; ++i) receive(0);
    rc_free(group);
}

}  // namespace

int main() {
    const rc_tuning tuning = small_tuning();
    for (const char* layout : LAYOUTS) {
        on({layout}, tuning, {small_calls_are_one_shot, messages_of_every_length_arrive, many_messages_are_open});
    }
    on({"01", "0101", "012"}, tuning, {messages_of_several_pulls_arrive});
    on({"01", "0011"}, tuning,
       {large_calls_run_their_program, queued_calls_run_in_order, messages_run_beside_collectives});
    on({"0011"}, tuning, {messages_inside_a_host_have_one_channel});
    rc_tuning roomy = tuning;
    roomy.arena_bytes = 4 << 20;
    on({"0011"}, roomy, {messages_move_while_a_rank_waits_in_a_rail});
    on({"01", "012"}, tuning, {two_threads_use_two_groups});
    on({"01", "0011", "01012"}, tuning,
       {small_calls_are_one_shot, messages_of_every_length_arrive, many_messages_are_open}, Connected::WHEN_NEEDED);
    on({"01", "0011"}, tuning, {large_calls_run_their_program, messages_of_several_pulls_arrive},
       Connected::WHEN_NEEDED);
    return failures > 0;
}
