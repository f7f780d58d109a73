// Communicators between hosts, over TCP connections on this machine: agreement, one pass, programs, messages and every
// way to fail. Meant for the sanitizers: no memory is accessed after a call has returned, and every call returns.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "network_world.h"

namespace {

constexpr uint64_t LARGE = 300'001;  // elements of int32: five pieces of a transfer
constexpr int UNTOUCHED = -77;

const char* const LAYOUTS[]{"01", "0011", "0101", "0001", "012", "01012"};

rc_tuning impatient() {
    rc_tuning tuning = small_tuning();
    tuning.timeout = 0.3;
    return tuning;
}

std::string message_of(int status, int expected) {
    if (status != expected)
        fprintf(stderr, "status %d instead of %d: %s\n", status, expected, rc_last_error()->message);
    CHECK(status == expected);
    return status ? rc_last_error()->message : "";
}

int path_of(rc_comm* comm) {
    int path;
    uint64_t number;
    DO(rc_last_path(comm, &path, &number));
    return path;
}

std::vector<int> numbers(size_t count, int first) {
    std::vector<int> found(count);
    std::iota(found.begin(), found.end(), first);
    return found;
}

// The sum of numbers(count, rank) over all ranks.
bool is_sum(const std::vector<int>& sum, int size) {
    for (size_t i = 0; i < sum.size(); ++i) {
        if (sum[i] != size * int(i) + size * (size - 1) / 2) return false;
    }
    return true;
}

// --- Values ----------------------------------------------------------------------------------------------------------

void small_calls_take_one_pass(NetworkRank& at) {
    const int n = at.size, me = at.rank;
    for (int turn = 0; turn < 20; ++turn) {
        const int root = turn % n;
        std::vector<int> x = numbers(turn, me), all(turn * n), mine(turn);
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
        DO(run(at.comm, RC_ALL_REDUCE, x.data(), mine.data(), turn));
        CHECK(path_of(at.comm) == RC_PATH_ONE_PASS);
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

rc_block block(int memory, uint64_t begin, uint64_t length) { return {memory, begin, length}; }

rc_step exchange(int peer, rc_block outgoing, rc_block incoming, rc_block operand = {}) {
    rc_step step{};
    step.kind = RC_STEP_EXCHANGE;
    step.dest = step.source = peer;
    step.outgoing = outgoing;
    step.incoming = incoming;
    step.operand = operand;
    return step;
}

rc_step inside(int collective, rc_block outgoing, rc_block incoming, uint64_t count) {
    rc_step step{};
    step.kind = RC_STEP_LOCAL;
    step.collective = collective;
    step.dest = step.source = -1;
    step.outgoing = outgoing;
    step.incoming = incoming;
    step.count = count;
    return step;
}

rc_step copy(rc_block outgoing, rc_block incoming) {
    rc_step step{};
    step.kind = RC_STEP_COPY;
    step.dest = step.source = -1;
    step.outgoing = outgoing;
    step.incoming = incoming;
    return step;
}

// An all_reduce on "01", or on "0011" in slices.
void add_sum(const NetworkRank& at, uint64_t count, const int* source, int* target) {
    const rc_block in = block(RC_MEMORY_IN, 0, count), out = block(RC_MEMORY_OUT, 0, count);
    const rc_block half = block(RC_MEMORY_SCRATCH, 0, count / 2), sum = block(RC_MEMORY_SCRATCH, count, count / 2);
    std::vector<rc_step> steps;
    if (at.size == 2) {
        const rc_block landed = block(RC_MEMORY_SCRATCH, 0, count);
        steps = {exchange(1 - at.rank, in, landed, in), copy(landed, out)};
    } else {
        const int peer = (at.rank + 2) % 4;
        steps = {inside(RC_REDUCE_SCATTER, in, half, count / 2), exchange(peer, half, sum, half),
                 inside(RC_ALL_GATHER, sum, out, count / 2)};
    }
    const rc_call call{source, target, count, RC_INT32, RC_SUM, 1.0, 0, nullptr};
    DO(rc_add_program(at.comm, RC_ALL_REDUCE, &call, 7, 2 * count, steps.data(), int(steps.size())));
}

void large_calls_run_their_program(NetworkRank& at) {
    for (const uint64_t count : {uint64_t{65536}, uint64_t{65538}, LARGE - 1}) {
        const std::vector<int> x = numbers(count, at.rank);
        std::vector<int> sum(count);
        CHECK(run(at.comm, RC_ALL_REDUCE, x.data(), sum.data(), count) == RC_NO_PROGRAM);
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

void messages_of_every_length_arrive(NetworkRank& at) {
    const int n = at.size, right = (at.rank + 1) % n, left = (at.rank + n - 1) % n;
    for (const size_t count : {0, 1, 8192, 8193, 20'000, 1'200'000}) {  // 32 KiB are eager; a pull has 4 MiB
        const std::vector<int> x = numbers(count, at.rank);
        std::vector<int> y(count, UNTOUCHED), z(count, UNTOUCHED);
        rc_work *sent, *received;
        int source;
        DO(rc_recv(at.comm, z.data(), count, RC_INT32, -1, 7, -1, nullptr, &received));
        DO(rc_send(at.comm, x.data(), count, RC_INT32, right, 7, -1, &sent));
        DO(rc_sendrecv(at.comm, x.data(), count, RC_INT32, right, y.data(), count, RC_INT32, left, 0, -1, &source));
        CHECK(source == left && y == numbers(count, left));
        DO(rc_work_wait(received, -1, &source));
        CHECK(source == left && z == numbers(count, left));
        rc_work_free(received);
        DO(finish(sent));
    }
}

void many_messages_are_open(NetworkRank& at) {
    const int peer = (at.rank + 1) % at.size, from = (at.rank + at.size - 1) % at.size;
    std::vector<std::vector<int>> sent, received;
    std::vector<rc_work*> works;
    for (int i = 0; i < 300; ++i) {
        sent.push_back(numbers(i % 10 ? 3 : 30'000, 100 * at.rank + i));
        received.emplace_back(sent.back().size());
    }
    for (int i = 0; i < 300; ++i) {
        DO(rc_send(at.comm, sent[i].data(), sent[i].size(), RC_INT32, peer, i % 7, -1, &works.emplace_back()));
    }
    for (int i = 0; i < 300; ++i) {
        DO(rc_recv(at.comm, received[i].data(), received[i].size(), RC_INT32, from, i % 7, -1, nullptr,
                   &works.emplace_back()));
    }
    for (size_t i = works.size(); i-- > 0;) DO(finish(works[i]));
    for (int i = 0; i < 300; ++i) CHECK(received[i] == numbers(received[i].size(), 100 * from + i));
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
                DO(rc_sendrecv(at.comm, x.data(), x.size(), RC_INT32, peer, y.data(), y.size(), RC_INT32, peer, tag, -1,
                               nullptr));
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
                add_sum({i ? 1 - at.rank : at.rank, 2, {}, nullptr, nullptr, groups[i]}, x.size(), x.data(),
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

// --- Failures --------------------------------------------------------------------------------------------------------

void check_usable(const NetworkRank& at) {
    const std::vector<int> x = numbers(10, at.rank);
    std::vector<int> sum(10);
    DO(run(at.comm, RC_ALL_REDUCE, x.data(), sum.data(), 10));
    CHECK(is_sum(sum, at.size));
}

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
        message_of(rc_recv(at.comm, x.data(), 5000, RC_INT32, -1, 0, -1, nullptr, nullptr), RC_ABORTED);
    } else {
        message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_ABORTED);
    }
    const std::string text = message_of(run(at.comm, RC_BARRIER, nullptr, nullptr, 0), RC_ABORTED);
    CHECK(text.find("the data is wrong") != std::string::npos && rc_last_error()->rank == at.size - 1);
}

// The abort comes at any moment of the transfers; their memory ends with the call.
void an_abort_in_large_calls(NetworkRank& at) {
    const rc_tuning tuning = small_tuning();
    const std::vector<int> members = numbers(at.size, 0), hosts = at.size == 2 ? members : std::vector{0, 0, 1, 1};
    for (uint64_t turn = 0; turn < 12; ++turn) {
        DO(run(at.comm, RC_BARRIER, nullptr, nullptr, 0));
        rc_comm *group, *local = nullptr;
        if (at.size > 2) break;
        DO(rc_network_group(at.network, 100 + turn, at.rank, at.size, members.data(), hosts.data(), local, nullptr,
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
                status = rc_sendrecv(group, sent.data(), sent.size(), RC_INT32, 1 - at.rank, received.data(),
                                     received.size(), RC_INT32, 1 - at.rank, 0, -1, nullptr);
                CHECK(status == RC_OK || status == RC_ABORTED);
            }
        });
        for (int status = RC_OK; status != RC_ABORTED;) {
            const std::vector<int> x(LARGE - 1, 1);
            std::vector<int> y(LARGE - 1);
            if (status == RC_OK) {
                const rc_call call{x.data(), y.data(), LARGE - 1, RC_INT32, RC_SUM, 1.0, 0, nullptr};
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
    if (at.rank == 1) return;  // its communicator is closed next
    std::vector<int> x(10);
    const std::string text = message_of(run(at.comm, RC_ALL_REDUCE, x.data(), x.data(), 10), RC_PEER_LOST);
    CHECK(rc_last_error()->rank == 1 && text.find("rank 1") != std::string::npos);
    message_of(rc_recv(at.comm, x.data(), 10, RC_INT32, 1, 0, -1, nullptr, nullptr), RC_PEER_LOST);
}

void what_a_rank_sent_before_it_left_arrives(NetworkRank& at) {
    std::vector<int> x = numbers(5000, 3), y(5000);
    if (at.rank == 1) {
        for (int r = 0; r < at.size; ++r) {
            if (r != 1) DO(rc_send(at.comm, x.data(), 5000, RC_INT32, r, 0, -1, nullptr));
        }
        return;
    }
    DO(rc_recv(at.comm, y.data(), 5000, RC_INT32, 1, 0, -1, nullptr, nullptr));
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
    CHECK(rc_last_error()->rank == 1 && text.find("rank 1 on another host was lost") != std::string::npos);
}

void a_timeout_names_the_late_rank(NetworkRank& at) {
    if (at.rank == 1) {
        int status = RC_OK;
        while (!status) status = rc_check(at.comm);
        message_of(status, RC_TIMEOUT);
        return;
    }
    std::vector<int> x(10);
    const std::string text = message_of(run(at.comm, RC_ALL_REDUCE, x.data(), x.data(), 10), RC_TIMEOUT);
    CHECK(rc_last_error()->rank == 1 && text.find("it was not called by rank 1") != std::string::npos);
}

void a_message_that_never_comes_is_a_timeout(NetworkRank& at) {
    std::vector<int> x(100'000);
    if (at.rank == 0) {
        message_of(rc_send(at.comm, x.data(), x.size(), RC_INT32, 1, 0, -1, nullptr), RC_TIMEOUT);
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
    DO(rc_recv(at.comm, x.data(), 10, RC_INT32, 1, 0, -1, nullptr, &received));
    std::thread waiter([&] {
        std::vector<int> y(10);
        CHECK(ended_by_closing(rc_recv(at.comm, y.data(), 10, RC_INT32, -1, 1, -1, nullptr, nullptr)));
    });
    DO(rc_close(at.comm));
    waiter.join();
    CHECK(ended_by_closing(finish(received)));
}

// The communicator of the host goes first, as the collector of a program may have it.
void a_host_that_is_closed_first(NetworkRank& at) {
    std::vector<int> x(5), y(5);
    rc_work* work;
    DO(run(at.comm, RC_ALL_REDUCE, x.data(), y.data(), 5, RC_INT32, RC_SUM, 0, nullptr, &work));
    rc_free(std::exchange(at.local, nullptr));
    const int status = finish(work);
    // A faster rank may have left, or aborted, before this one began.
    CHECK(status == RC_OK || status == RC_CLOSED || status == RC_PEER_LOST || status == RC_ABORTED);
    rc_abort(at.comm, RC_ABORTED, at.rank, "enough");
}

using Test = void (*)(NetworkRank&);

void on(std::initializer_list<const char*> layouts, const rc_tuning& tuning, std::initializer_list<Test> tests) {
    for (const char* layout : layouts) {
        for (const Test test : tests) on_hosts(layout, tuning, test);
    }
}

}  // namespace

int main() {
    const rc_tuning tuning = small_tuning();
    for (const char* layout : LAYOUTS) {
        on({layout}, tuning,
           {small_calls_take_one_pass, messages_of_every_length_arrive, many_messages_are_open,
            different_calls_leave_outputs_untouched, every_rank_calls_something_else, a_failure_reaches_every_rank,
            a_rank_that_leaves_is_named, what_a_rank_sent_before_it_left_arrives,
            closing_wakes_the_waiters_of_this_rank});
        on({layout}, impatient(), {a_timeout_names_the_late_rank});
    }
    on({"01", "0011"}, tuning,
       {large_calls_run_their_program, queued_calls_run_in_order, large_calls_mismatch_too,
        messages_run_beside_collectives, a_host_that_is_closed_first});
    on({"01", "012"}, tuning, {two_threads_use_two_groups, a_lost_peer_is_named});
    on({"01", "012"}, impatient(), {a_message_that_never_comes_is_a_timeout});
    on({"01"}, tuning, {an_abort_in_large_calls});
    on({"0123456789abcdefghij"}, tuning, {every_rank_calls_something_else});
    return failures > 0;
}
