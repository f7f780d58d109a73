// Small asynchronous collectives begin on the thread of their caller, and who polls or waits completes them: no other
// thread takes part, unless nobody will do either.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "memory/layout.h"
#include "world.h"

namespace {

constexpr uint64_t COUNT = 16, LARGE = 5000;

int sum(int n, uint64_t i) { return n * (n - 1) / 2 + n * int(i); }

struct Array {
    Array(int rank, uint64_t count) : data(count) {
        for (uint64_t i = 0; i < count; ++i) data[i] = rank + int(i);
    }
    rc_work* all_reduce(rc_comm* comm) {
        rc_work* work = nullptr;
        DO(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size(), RC_INT32, RC_SUM, 0, nullptr, &work));
        return work;
    }
    bool is_reduced(int n) const {
        for (uint64_t i = 0; i < data.size(); ++i) {
            if (data[i] != sum(n, i)) return false;
        }
        return true;
    }
    std::vector<int> data;
};

int threads() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
    }
    return -1;
}

// What the flight record says of the last call of a rank.
std::string state_of(rc_comm* comm, int rank) {
    std::vector<char> report(1 << 16);
    DO(rc_report(comm, 1, report.data(), report.size()));
    std::istringstream lines(report.data());
    std::string line;
    for (int r = 0; r <= rank; ++r) std::getline(lines, line);
    return line;
}

// Rank 0 has not waited yet when the blocking calls of the others return.
std::atomic<int> returned{0};
void peers_need_no_wait_of_this_rank(rc_comm* comm, int rank, int n) {
    Array small(rank, COUNT);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    const int before = threads();
    if (rank == 0) {
        rc_work* const work = small.all_reduce(comm);
        while (returned.load() < n - 1) std::this_thread::yield();
        CHECK(!small.is_reduced(n));
        DO(finish(work));
    } else {
        DO(run(comm, RC_ALL_REDUCE, small.data.data(), small.data.data(), COUNT));
        ++returned;
    }
    CHECK(small.is_reduced(n));
    CHECK(threads() <= before);
}

void polls_complete_calls_in_order(rc_comm* comm, int rank, int n) {
    for (int round = 0; round < 50; ++round) {
        Array first(rank, COUNT), second(rank, LARGE), third(rank, COUNT);
        rc_work* const works[] = {first.all_reduce(comm), second.all_reduce(comm), third.all_reduce(comm)};
        while (!rc_work_done(works[round % 3])) std::this_thread::yield();
        for (int k = 0; k <= round % 3; ++k) CHECK(rc_work_done(works[k]));
        for (rc_work* const work : works) DO(finish(work));
        CHECK(first.is_reduced(n) && second.is_reduced(n) && third.is_reduced(n));
    }
}

// Nobody waits for the calls, nor polls: once they are detached, they end all the same.
void detached_calls_go_on(rc_comm* comm, int rank, int n) {
    Array small(rank, COUNT), last(rank, COUNT);
    rc_work* const work = small.all_reduce(comm);
    DO(rc_work_notify(work, uint64_t(rank) + 1));
    std::vector<bool> told(n);
    if (rank == 0) {
        for (int p = 0; p < n; ++p) told[rc_next_done(60) - 1] = true;
        CHECK(std::count(told.begin(), told.end(), true) == n);
    }
    DO(finish(work));
    CHECK(small.is_reduced(n));
    rc_work_free(last.all_reduce(comm));
    while (state_of(comm, rank).find("running") != std::string::npos) std::this_thread::yield();
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    CHECK(last.is_reduced(n));
}

// Threads of a rank that wait for calls of each other do not sleep while they could run them.
void threads_wait_for_each_others_calls(rc_comm* comm, int rank, int n) {
    for (int round = 0; round < 50; ++round) {
        Array first(rank, COUNT), second(rank, LARGE), third(rank, COUNT);
        rc_work* const works[] = {first.all_reduce(comm), second.all_reduce(comm), third.all_reduce(comm)};
        std::thread waiter([&] { DO(finish(works[2])); });
        std::thread poller([&] {
            while (!rc_work_done(works[1])) std::this_thread::yield();
            DO(finish(works[1]));
        });
        DO(finish(works[0]));
        waiter.join();
        poller.join();
        CHECK(first.is_reduced(n) && second.is_reduced(n) && third.is_reduced(n));
    }
}

void every_small_call_starts(rc_comm* comm, int rank, int n) {
    const uint64_t piece = 4;
    std::vector<int> mine(n * piece, rank), all(n * piece), one(piece);
    const auto done = [&](int collective, const void* source, void* target, int root) {
        rc_work* work;
        DO(run(comm, collective, source, target, piece, RC_INT32, RC_MAX, root, nullptr, &work));
        DO(finish(work));
    };
    for (int root = 0; root < n; ++root) {
        const bool is_root = rank == root;
        std::vector<int> sent(piece, rank);
        done(RC_BROADCAST, sent.data(), sent.data(), root);
        CHECK(std::count(sent.begin(), sent.end(), root) == long(piece));
        done(RC_REDUCE, mine.data(), is_root ? one.data() : nullptr, root);
        CHECK(!is_root || std::count(one.begin(), one.end(), n - 1) == long(piece));
        done(RC_GATHER, mine.data(), is_root ? all.data() : nullptr, root);
        for (uint64_t i = 0; is_root && i < all.size(); ++i) CHECK(all[i] == int(i / piece));
        done(RC_SCATTER, is_root ? all.data() : nullptr, one.data(), root);
        CHECK(std::count(one.begin(), one.end(), rank) == long(piece));
    }
    done(RC_ALL_GATHER, mine.data(), all.data(), 0);
    std::vector<int> turned(n * piece);
    done(RC_ALL_TO_ALL, all.data(), turned.data(), 0);
    CHECK(std::count(turned.begin(), turned.end(), rank) == long(n * piece));
    done(RC_REDUCE_SCATTER, turned.data(), one.data(), 0);
    CHECK(std::count(one.begin(), one.end(), n - 1) == long(piece));
}

// Rank 0 is ahead by a one-way call, and the room of its blocks, each as long as the longest, exceeds a start record.
std::atomic<bool> ahead{false};
void a_start_waits_for_no_rank(rc_comm* comm, int rank, int n) {
    constexpr uint64_t LENGTH = 100;
    std::vector<int> x(LENGTH, rank), one(rank ? 0 : LENGTH);
    std::vector<uint64_t> counts(n);
    counts[0] = LENGTH;
    if (rank == 0) ahead = false;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    while (rank && !ahead.load() && rc_check(comm) == RC_OK) std::this_thread::yield();
    DO(run(comm, RC_BROADCAST, x.data(), x.data(), COUNT));
    std::fill(x.begin(), x.end(), rank);
    rc_work* work = nullptr;
    DO(run(comm, RC_REDUCE_SCATTER, x.data(), one.data(), LENGTH, RC_INT32, RC_SUM, 0, counts.data(), &work));
    ahead = true;
    DO(finish(work));
    CHECK(std::count(one.begin(), one.end(), n * (n - 1) / 2) == long(one.size()));
}

// Rank 0 is as far ahead as it may be: its next call begins once the others come.
void a_start_waits_for_no_record(rc_comm* comm, int rank, int n) {
    std::vector<int> x(COUNT);
    if (rank == 0) ahead = false;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    while (rank && !ahead.load() && rc_check(comm) == RC_OK) std::this_thread::yield();
    for (uint64_t k = 0; k < ringcomm::record_slots(n) / 2; ++k) {
        x.assign(COUNT, rank + int(k));
        DO(run(comm, RC_BROADCAST, x.data(), x.data(), COUNT));
        CHECK(x == std::vector<int>(COUNT, int(k)));
    }
    Array next(rank, COUNT);
    rc_work* const work = next.all_reduce(comm);
    ahead = true;
    DO(finish(work));
    CHECK(next.is_reduced(n));
}

// The others come once rank 0 has polled.
void a_poll_waits_for_no_rank(rc_comm* comm, int rank, int n) {
    Array small(rank, COUNT);
    if (rank == 0) ahead = false;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    while (rank && !ahead.load() && rc_check(comm) == RC_OK) std::this_thread::yield();
    rc_work* const work = small.all_reduce(comm);
    if (rank == 0) CHECK(!rc_work_done(work));
    ahead = true;
    DO(finish(work));
    CHECK(small.is_reduced(n));
}

// The last rank starts once rank 1 has polled: to name the calls of all ranks, the poll would have to wait for it.
std::atomic<bool> polled{false};
void a_poll_of_a_mismatch_waits_for_no_rank(rc_comm* comm, int rank, int n) {
    std::vector<int> data(COUNT + 1);
    if (rank == 0) polled = false;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    while (rank > 1 && !polled.load() && rc_check(comm) == RC_OK) std::this_thread::yield();
    rc_work* work = nullptr;
    DO(run(comm, RC_BROADCAST, data.data(), data.data(), COUNT + (rank == 1), RC_INT32, RC_SUM, 0, nullptr, &work));
    if (rank == 1) {
        for (int i = 0; i < 1000; ++i) CHECK(!rc_work_done(work) || n == 2);
        polled = true;
    }
    CHECK(finish(work) == (rank == 1 ? RC_MISMATCH : RC_OK));
    CHECK(run(comm, RC_BARRIER, nullptr, nullptr, 0) == (rank == 1 ? RC_OK : RC_MISMATCH));
}

// Rank 0 never takes part: who polls learns of it, too.
void a_poll_ends_with_a_failure(rc_comm* comm, int rank) {
    if (rank == 0) {
        while (rc_check(comm) == RC_OK) std::this_thread::yield();
        return;
    }
    Array small(rank, COUNT);
    rc_work* const work = small.all_reduce(comm);
    while (!rc_work_done(work)) std::this_thread::yield();
    CHECK(finish(work) == RC_TIMEOUT);
}

void a_mismatch_is_named_and_the_next_call_matches(rc_comm* comm, int rank, int n) {
    Array small(rank, COUNT + rank), next(rank, COUNT);
    rc_work* const work = small.all_reduce(comm);
    CHECK(finish(work) == RC_MISMATCH);
    DO(finish(next.all_reduce(comm)));
    CHECK(next.is_reduced(n));
}

// What has begun ends when the communicator closes.
void closing_ends_started_calls(rc_comm* comm, int rank) {
    if (rank == 0) {
        DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
        return;
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    Array small(rank, COUNT), other(rank, COUNT);
    rc_work *const started = small.all_reduce(comm), *const queued = other.all_reduce(comm);
    DO(rc_close(comm));
    const int status = finish(started);
    CHECK(status == RC_CLOSED || status == RC_PEER_LOST);
    CHECK(finish(queued) == RC_CLOSED);
}

}  // namespace

int main() {
    for (int n : {2, 3, 5}) {
        returned = 0;
        in_world(n, small_tuning(), [n](rc_comm* comm, int rank) {
            peers_need_no_wait_of_this_rank(comm, rank, n);
            every_small_call_starts(comm, rank, n);
            a_start_waits_for_no_rank(comm, rank, n);
            a_start_waits_for_no_record(comm, rank, n);
            a_poll_waits_for_no_rank(comm, rank, n);
            a_poll_of_a_mismatch_waits_for_no_rank(comm, rank, n);
            polls_complete_calls_in_order(comm, rank, n);
            detached_calls_go_on(comm, rank, n);
            threads_wait_for_each_others_calls(comm, rank, n);
            a_mismatch_is_named_and_the_next_call_matches(comm, rank, n);
        });
        in_world(n, impatient(), a_poll_ends_with_a_failure);
        in_world(n, small_tuning(), closing_ends_started_calls);
    }
    printf("test_started_calls: %d failures\n", failures.load());
    return failures != 0;
}
