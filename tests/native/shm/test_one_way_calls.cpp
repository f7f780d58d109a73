// Rooted collectives of little data: who only gives it does not wait for the others, and a mismatch is raised on every
// rank all the same.
#include <cstring>
#include <random>

#include "world.h"

namespace {

constexpr uint64_t COUNT = 4;

std::atomic<int> returned{0};

void root_and_leaves_run_ahead(rc_comm* comm, int rank, int n) {
    constexpr int CALLS = 4;  // fewer than a rank may be ahead
    std::vector<int> data(COUNT), sums(COUNT);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank != 0) {
        while (returned.load() == 0) std::this_thread::yield();
    }
    for (int k = 0; k < CALLS; ++k) {
        if (rank == 0) data.assign(COUNT, k + 1);
        DO(run(comm, RC_BROADCAST, data.data(), data.data(), COUNT));
        CHECK(data == std::vector<int>(COUNT, k + 1));
        data.assign(COUNT, -1);
    }
    ++returned;
    while (returned.load() < n) std::this_thread::yield();
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) returned = 0;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    // And the other way: rank 0 begins once the others have returned.
    while (rank == 0 && returned.load() < n - 1) std::this_thread::yield();
    for (int k = 0; k < CALLS; ++k) {
        data.assign(COUNT, k + rank);
        DO(run(comm, RC_REDUCE, data.data(), rank == 0 ? sums.data() : nullptr, COUNT));
        CHECK(rank != 0 || sums == std::vector<int>(COUNT, k * n + n * (n - 1) / 2));
    }
    ++returned;
}

// Ranks run ahead of each other in all orders, among calls of all sizes.
void mixed_calls_are_exact(rc_comm* comm, int rank, int n) {
    std::mt19937 same(17), own(rank);
    for (int k = 0; k < 2000; ++k) {
        const int kind = same() % 8, root = same() % n;
        const uint64_t count = same() % 3 ? 1 + same() % 16 : 1 + same() % 2000;
        const bool is_root = rank == root;
        std::vector<int> mine(count), all(n * count), one(count);
        for (uint64_t i = 0; i < count; ++i) mine[i] = rank + k + int(i);
        const auto is = [&](const std::vector<int>& data, int p, uint64_t at = 0) {
            for (uint64_t i = 0; i < count; ++i) {
                if (data[at + i] != p + k + int(i)) return false;
            }
            return true;
        };
        if (own() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
        if (kind < 2) {
            DO(run(comm, RC_BROADCAST, mine.data(), mine.data(), count, RC_INT32, RC_SUM, root));
            CHECK(is(mine, root));
        } else if (kind < 4) {
            DO(run(comm, RC_REDUCE, mine.data(), is_root ? one.data() : nullptr, count, RC_INT32, RC_MAX, root));
            CHECK(!is_root || is(one, n - 1));
        } else if (kind == 4) {
            DO(run(comm, RC_GATHER, mine.data(), is_root ? all.data() : nullptr, count, RC_INT32, RC_SUM, root));
            for (int p = 0; p < n && is_root; ++p) CHECK(is(all, p, p * count));
        } else if (kind == 5) {
            for (int p = 0; p < n; ++p) {
                for (uint64_t i = 0; i < count; ++i) all[p * count + i] = p + k + int(i);
            }
            DO(run(comm, RC_SCATTER, is_root ? all.data() : nullptr, one.data(), count, RC_INT32, RC_SUM, root));
            CHECK(is(one, rank));
        } else if (kind == 6) {
            DO(run(comm, RC_ALL_REDUCE, mine.data(), one.data(), count, RC_INT32, RC_MAX));
            CHECK(is(one, n - 1));
        } else {
            DO(run(comm, RC_ALL_TO_ALL, all.data(), std::vector<int>(n * count).data(), count));
        }
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

// The last rank expects another count. It and the root cannot both know at once; the next call that sees it raises it,
// and has done its work.
void a_mismatch_is_raised_once_on_every_rank(rc_comm* comm, int rank, int n, int collective) {
    const int last = n - 1;
    const uint64_t count = rank == last ? COUNT + 1 : COUNT;
    std::vector<int> data(COUNT + 1, rank), target((COUNT + 1) * n), value(1, rank);
    const bool from_root = collective == RC_BROADCAST;
    const int status = run(comm, collective, data.data(),
                           from_root ? data.data()
                           : rank    ? nullptr
                                     : target.data(),
                           count);
    CHECK(status == (from_root == (rank == last) && (from_root || rank == 0) ? RC_MISMATCH : RC_OK));
    if (status == RC_MISMATCH) CHECK(rc_last_error()->collective == collective);
    const uint64_t epoch = status == RC_MISMATCH ? rc_last_error()->epoch : 0;
    const int next = run(comm, RC_ALL_REDUCE, value.data(), value.data(), 1);
    CHECK(next == (status == RC_MISMATCH ? RC_OK : RC_MISMATCH));
    if (next == RC_MISMATCH) {
        CHECK(rc_last_error()->collective == collective && rc_last_error()->epoch > epoch);
        CHECK(strstr(rc_last_error()->message, collective == RC_BROADCAST ? "broadcast(int32 x 5" : "int32 x 5"));
    }
    CHECK(value[0] == n * (n - 1) / 2);
    DO(run(comm, RC_ALL_REDUCE, value.data(), value.data(), 1));
}

// The last rank calls something else than the first part of a call of several: no other rank goes on to the second.
void a_mismatch_is_confirmed_before_the_next_part(rc_comm* comm, int rank, int n) {
    std::vector<int> data(COUNT, rank), value(1, rank);
    int32_t late = 0;
    const rc_call part{data.data(), data.data(), COUNT, RC_INT32, RC_SUM, 1.0, 0, nullptr, &late};
    for (int k = 0; k < 3; ++k) {
        DO(rc_collective(comm, RC_BROADCAST, &part, -1, nullptr));
        DO(rc_confirm(comm, -1));
        if (rank == n - 1) {
            CHECK(run(comm, RC_ALL_REDUCE, value.data(), value.data(), 1) == RC_MISMATCH);
        } else {
            DO(rc_collective(comm, RC_BROADCAST, &part, -1, nullptr));
            CHECK(rc_confirm(comm, -1) == RC_MISMATCH);
        }
        CHECK(rc_last_error()->collective == (rank == n - 1 ? RC_ALL_REDUCE : RC_BROADCAST));
        value[0] = rank;
        DO(run(comm, RC_ALL_REDUCE, value.data(), value.data(), 1));
        CHECK(value[0] == n * (n - 1) / 2);
        value[0] = rank;
    }
}

void a_rank_that_never_comes_is_named(rc_comm* comm, int rank) {
    std::vector<int> data(COUNT);
    while (rank == 1 && rc_check(comm) == RC_OK) std::this_thread::yield();
    int status = RC_OK;
    for (int k = 0; k < 100 && status == RC_OK; ++k) {
        status = run(comm, RC_BROADCAST, data.data(), data.data(), COUNT);
    }
    CHECK(status == RC_TIMEOUT && rc_last_error()->rank == 1);
    if (rank == 0) CHECK(strstr(rc_last_error()->message, "(epoch 1) was not called by rank"));
}

}  // namespace

int main() {
    for (int n : {2, 3, 5, 12}) {  // with 64 start records each, and with 32
        returned = 0;
        in_world(n, small_tuning(), [n](rc_comm* comm, int rank) {
            root_and_leaves_run_ahead(comm, rank, n);
            mixed_calls_are_exact(comm, rank, n);
            for (int collective : {RC_BROADCAST, RC_REDUCE, RC_GATHER}) {
                a_mismatch_is_raised_once_on_every_rank(comm, rank, n, collective);
            }
            a_mismatch_is_confirmed_before_the_next_part(comm, rank, n);
        });
        in_world(n, impatient(), a_rank_that_never_comes_is_named);
    }
    printf("test_one_way_calls: %d failures\n", failures.load());
    return failures != 0;
}
