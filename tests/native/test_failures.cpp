// What breaks a communicator, while others are inside it: for the sanitizers, so what counts is that nothing is touched
// after it was let go, that everybody comes out, and with which status.
#include <algorithm>
#include <cstring>

#include "shared.h"
#include "world.h"

using ringcomm::LETTERS;

namespace {

rc_tuning impatient() {
    rc_tuning tuning = small_tuning();
    tuning.timeout = 0.3;
    return tuning;
}

int message(rc_comm* comm, std::vector<int>& data, int from, rc_work** work = nullptr) {
    return rc_recv(comm, data.data(), data.size(), RC_INT32, from, 0, -1, nullptr, work);
}

// If the barrier of rank 0 was published before it closed, the others get a mismatch, and go; then rank 0 may see that
// they went before its own waits see that it closes.
bool ended_by_closing(int status) { return status == RC_CLOSED || status == RC_MISMATCH || status == RC_PEER_LOST; }

void closing_wakes_the_waiters_of_this_rank(rc_comm* comm, int rank) {
    std::vector<int> data(5000), more(5000);
    if (rank != 0) {
        CHECK(ended_by_closing(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size())));
        return;
    }
    rc_work *queued, *received;
    DO(message(comm, more, 1, &received));
    std::thread receiver([&] {
        std::vector<int> other(10);
        CHECK(ended_by_closing(message(comm, other, 2)));
    });
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0, RC_INT32, RC_SUM, 0, nullptr, &queued));
    std::thread waiter([&] { CHECK(ended_by_closing(rc_work_wait(queued, -1, nullptr))); });
    DO(rc_close(comm));
    receiver.join();
    waiter.join();
    CHECK(ended_by_closing(rc_work_wait(received, -1, nullptr)));
    CHECK(run(comm, RC_BARRIER, nullptr, nullptr, 0) == RC_CLOSED);
    rc_work_free(queued);
    rc_work_free(received);
}

void an_abort_ends_every_wait(rc_comm* comm, int rank) {
    std::vector<int> data(5000), more(5000);
    if (rank == 0) {
        DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    } else if (rank == 1) {
        CHECK(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()) == RC_ABORTED);
    } else {
        rc_work* work;
        const int status = message(comm, more, 0, &work);  // it may be told already here
        CHECK(status == RC_OK || status == RC_ABORTED);
        CHECK(message(comm, data, -1) == RC_ABORTED);
        if (status == RC_OK) {
            CHECK(rc_work_wait(work, -1, nullptr) == RC_ABORTED);
            rc_work_free(work);
        }
    }
    CHECK(rc_check(comm) == RC_ABORTED);
}

void a_late_rank_gets_the_first_reason(rc_comm* comm, int rank) {
    std::vector<int> data(5000);
    while (rank == 2 && rc_check(comm) == RC_OK) std::this_thread::yield();
    CHECK(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()) == RC_TIMEOUT);
    CHECK(rc_last_error()->rank == 2);
}

// Nobody waits: the worker must notice by itself, also behind a receive that has all the time in the world.
void a_deadline_in_the_background_is_kept(rc_comm* comm, int rank) {
    if (rank != 0) {
        while (rc_check(comm) == RC_OK) std::this_thread::yield();
        return;
    }
    std::vector<int> patient(10), impatient(10);
    rc_work* works[2];
    DO(rc_recv(comm, patient.data(), 10, RC_INT32, 1, 1, 1000.0, nullptr, &works[0]));
    DO(rc_recv(comm, impatient.data(), 10, RC_INT32, 2, 2, 0.2, nullptr, &works[1]));
    for (rc_work* work : works) {
        while (!rc_work_done(work)) std::this_thread::yield();
        CHECK(rc_work_wait(work, -1, nullptr) == RC_TIMEOUT);
        rc_work_free(work);
    }
}

// Rank 2 closes first; rank 1 sends once it has seen that; rank 0 has waited all the time.
void a_receive_from_anybody_does_without_those_that_closed(rc_comm* comm, int rank) {
    std::vector<int> data(5000, rank);
    char report[4096] = "";
    if (rank == 0) {
        int from;
        DO(rc_recv(comm, data.data(), data.size(), RC_INT32, -1, 0, 30.0, &from, nullptr));
        CHECK(from == 1 && data[4999] == 1);
        CHECK(message(comm, data, -1) == RC_PEER_LOST);
    } else if (rank == 1) {
        while (!strstr(report, "rank 2: closed")) DO(rc_report(comm, 1, report, sizeof report));
        DO(rc_send(comm, data.data(), data.size(), RC_INT32, 0, 0, -1, nullptr));
    }
}

void many_threads_receive_from_anybody(rc_comm* comm, int rank) {
    constexpr int THREADS = 4, EACH = 50;
    if (rank == 0) {
        std::vector<std::thread> receivers;
        for (int t = 0; t < THREADS; ++t) {
            receivers.emplace_back([&] {
                std::vector<int> data(2000);
                for (int i = 0; i < EACH; ++i) DO(message(comm, data, -1));
            });
        }
        for (auto& receiver : receivers) receiver.join();
    } else {
        std::vector<int> data(2000);
        for (int i = 0; i < THREADS * EACH / 2; ++i) {
            DO(rc_send(comm, data.data(), data.size(), RC_INT32, 0, 0, -1, nullptr));
        }
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

// Rank 2 breaks the communicator while rank 1 reads from the memory of rank 0, which then lets go of it.
void memory_is_not_read_after_its_owner_was_woken(rc_comm* comm, int rank) {
    std::vector<int> data(3'000'000, rank);
    char report[4096] = "";
    if (rank == 0) {
        const int status = rc_send(comm, data.data(), data.size(), RC_INT32, 1, 0, -1, nullptr);
        std::fill(data.begin(), data.end(), 3);
        CHECK(status == RC_OK || status == RC_ABORTED);
    } else if (rank == 1) {
        const int status = message(comm, data, 0);
        CHECK(status == RC_OK || status == RC_ABORTED);
        for (const int value : data) CHECK(value == 0 || (status == RC_ABORTED && value == 1));
    } else {
        while (!strstr(report, "recv(int32")) DO(rc_report(comm, 1, report, sizeof report));
        DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    }
}

// Rank 1 sends as many letters as the ring holds, so that its answer to the offer of rank 0 finds no room; and then it
// makes no call any more.
void an_answer_that_finds_no_room_is_not_lost(rc_comm* comm, int rank) {
    static std::atomic<int> answered{0};
    std::vector<int> data(5000, rank);
    char report[4096] = "";
    const int before = answered.load();
    if (rank == 0) {
        rc_work* work;
        DO(rc_send(comm, data.data(), data.size(), RC_INT32, 1, 0, -1, &work));
        while (answered.load() == before) std::this_thread::yield();
        DO(rc_work_wait(work, 10, nullptr));
        rc_work_free(work);
        for (uint64_t i = 0; i < LETTERS; ++i) DO(rc_recv(comm, data.data(), 1, RC_INT32, 1, 1, -1, nullptr, nullptr));
    } else {
        while (!strstr(report, "send(int32 x 5000")) DO(rc_report(comm, 1, report, sizeof report));
        for (uint64_t i = 0; i < LETTERS; ++i) DO(rc_send(comm, data.data(), 1, RC_INT32, 0, 1, -1, nullptr));
        DO(message(comm, data, 0));
        CHECK(data[4999] == 0);
        ++answered;
        while (!strstr(report, "recv(int32 x 1,")) DO(rc_report(comm, 1, report, sizeof report));
    }
}

void a_thread_gets_what_another_one_sends_to_its_own_rank(rc_comm* comm, int) {
    for (int i = 0; i < 20; ++i) {
        std::vector<int> received(100), sent(100, i);
        std::thread receiver([&] { DO(rc_recv(comm, received.data(), 100, RC_INT32, 0, 7, -1, nullptr, nullptr)); });
        DO(rc_send(comm, sent.data(), 100, RC_INT32, 0, 7, -1, nullptr));
        receiver.join();
        CHECK(received == sent);
    }
    std::vector<int> ten(10), three(3);
    const uint64_t counts[] = {10, 3};
    CHECK(run(comm, RC_ALL_TO_ALL, ten.data(), three.data(), 0, RC_INT32, RC_SUM, 0, counts) == RC_MISMATCH);
}

// Somebody aborts in the middle of a call; its arrays are freed at once, while others may be using them.
void what_a_failed_call_used_may_be_freed(rc_comm* comm, int rank, int delay) {
    constexpr uint64_t COUNT = 1 << 20;
    std::vector<int> data(COUNT, rank), all(3 * COUNT);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    std::thread aborter([&] {
        for (int i = 0; i < delay; ++i) std::this_thread::yield();
        if (rank == 0) DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    });
    const int status = run(comm, RC_ALL_GATHER, data.data(), all.data(), COUNT);
    CHECK(status == RC_OK || status == RC_ABORTED);
    std::vector<int>().swap(data);
    std::vector<int>().swap(all);
    aborter.join();
}

}  // namespace

int main() {
    in_world(3, small_tuning(), closing_wakes_the_waiters_of_this_rank);
    in_world(3, small_tuning(), an_abort_ends_every_wait);
    in_world(3, impatient(), a_late_rank_gets_the_first_reason);
    in_world(3, small_tuning(), a_deadline_in_the_background_is_kept);
    in_world(3, small_tuning(), a_receive_from_anybody_does_without_those_that_closed);
    in_world(3, small_tuning(), many_threads_receive_from_anybody);
    for (int i = 0; i < 5; ++i) in_world(3, small_tuning(DIRECT), memory_is_not_read_after_its_owner_was_woken);
    for (int i = 0; i < 50; ++i) in_world(2, small_tuning(), an_answer_that_finds_no_room_is_not_lost);
    in_world(1, small_tuning(), a_thread_gets_what_another_one_sends_to_its_own_rank);
    for (Way way : {STAGED, DIRECT, COPIED}) {
        for (int delay = 1; delay < 10'000; delay *= 2) {
            in_world(3, small_tuning(way),
                     [delay](rc_comm* comm, int rank) { what_a_failed_call_used_may_be_freed(comm, rank, delay); });
        }
    }
    printf("test_failures: %d failures\n", failures.load());
    return failures != 0;
}
