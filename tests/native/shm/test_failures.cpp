// Failures of a communicator while ranks are inside it. Meant for the sanitizers: no memory is accessed after its
// release, and every call returns, with the right status.
#include <algorithm>
#include <cstring>

#include "memory/layout.h"
#include "world.h"

using ringcomm::PACKETS;

namespace {

int message(rc_comm* comm, std::vector<int>& data, int from, rc_work** work = nullptr) {
    const rc_transfer received = transfer_of(RC_RECV, data.data(), data.size(), RC_INT32, from, 0);
    return work ? start(comm, received, work) : run(comm, received);
}

void await_report(rc_comm* comm, const char* text) {
    char report[4096] = "";
    while (!strstr(report, text)) DO(rc_report(comm, 1, report, sizeof report));
}

// If rank 0 published its barrier before it closed, the others get a mismatch and leave; rank 0 may then detect that
// they left before its own waits detect the close.
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
    std::thread waiter([&] { CHECK(ended_by_closing(finish(queued))); });
    DO(rc_close(comm));
    receiver.join();
    waiter.join();
    CHECK(ended_by_closing(finish(received)));
    CHECK(run(comm, RC_BARRIER, nullptr, nullptr, 0) == RC_CLOSED);
}

void an_abort_ends_every_wait(rc_comm* comm, int rank) {
    std::vector<int> data(5000), more(5000);
    if (rank == 0) {
        DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    } else if (rank == 1) {
        CHECK(run(comm, RC_ALL_REDUCE, data.data(), data.data(), data.size()) == RC_ABORTED);
    } else {
        rc_work* work;
        const int status = message(comm, more, 0, &work);  // the failure may already be known
        CHECK(status == RC_OK || status == RC_ABORTED);
        CHECK(message(comm, data, -1) == RC_ABORTED);
        if (status == RC_OK) {
            CHECK(finish(work) == RC_ABORTED);
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

// No thread waits: the worker must detect the timeout, also behind a receive with a long timeout.
void a_deadline_in_the_background_is_kept(rc_comm* comm, int rank) {
    if (rank != 0) {
        while (rc_check(comm) == RC_OK) std::this_thread::yield();
        return;
    }
    std::vector<int> patient(10), impatient(10);
    rc_work* works[2];
    DO(start(comm, transfer_of(RC_RECV, patient.data(), 10, RC_INT32, 1, 1, 1000.0), &works[0]));
    DO(start(comm, transfer_of(RC_RECV, impatient.data(), 10, RC_INT32, 2, 2, 0.2), &works[1]));
    for (rc_work* work : works) {
        while (!rc_work_done(work)) std::this_thread::yield();
        CHECK(finish(work) == RC_TIMEOUT);
    }
}

// Rank 2 closes; rank 1 sends when it has seen that; rank 0 waits throughout.
void a_receive_from_any_ignores_ranks_that_closed(rc_comm* comm, int rank) {
    std::vector<int> data(5000, rank);
    if (rank == 0) {
        int from;
        DO(run(comm, transfer_of(RC_RECV, data.data(), data.size(), RC_INT32, -1, 0, 30.0), &from));
        CHECK(from == 1 && data[4999] == 1);
        CHECK(message(comm, data, -1) == RC_PEER_LOST);
    } else if (rank == 1) {
        await_report(comm, "rank 2: closed");
        DO(run(comm, transfer_of(RC_SEND, data.data(), data.size(), RC_INT32, 0, 0)));
    }
}

// Rank 1 announces it behind messages that find no room, and then waits as mpi4py's Finalize does.
void a_rank_that_is_about_to_close_is_not_waited_for(rc_comm* comm, int rank) {
    constexpr int MANY = 4 * PACKETS;
    if (rank == 1) {
        for (int i = 0; i < MANY; ++i) DO(run(comm, transfer_of(RC_SEND, &i, 1, RC_INT32, 0, 0)));
        DO(rc_announce_close(comm));
        CHECK(run(comm, RC_BARRIER, nullptr, nullptr, 0) == RC_PEER_LOST);
        return;
    }
    for (int i = 0, value = -1; i < MANY; ++i) {
        DO(run(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 1, 0)));
        CHECK(value == i);
    }
    CHECK(run(comm, transfer_of(RC_PROBE, nullptr, 0, RC_INT32, 1, 0)) == RC_PEER_LOST && rc_last_error()->rank == 1);
}

void many_threads_receive_from_any(rc_comm* comm, int rank) {
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
            DO(run(comm, transfer_of(RC_SEND, data.data(), data.size(), RC_INT32, 0, 0)));
        }
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

// Rank 2 breaks the communicator while rank 1 reads from the memory of rank 0, which then reuses it.
void memory_is_not_read_after_its_owner_was_woken(rc_comm* comm, int rank) {
    std::vector<int> data(3'000'000, rank);
    if (rank == 0) {
        const int status = run(comm, transfer_of(RC_SEND, data.data(), data.size(), RC_INT32, 1, 0));
        std::fill(data.begin(), data.end(), 3);
        CHECK(status == RC_OK || status == RC_ABORTED);
    } else if (rank == 1) {
        const int status = message(comm, data, 0);
        CHECK(status == RC_OK || status == RC_ABORTED);
        for (const int value : data) CHECK(value == 0 || (status == RC_ABORTED && value == 1));
    } else {
        await_report(comm, "recv(int32");
        DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    }
}

// Rank 1 fills its ring with packets, so that its answer to the RTS of rank 0 finds no room, and then makes no further
// call.
void an_answer_that_finds_no_room_is_not_lost(rc_comm* comm, int rank) {
    static std::atomic<int> answered{0};
    std::vector<int> data(5000, rank);
    const int before = answered.load();
    if (rank == 0) {
        rc_work* work;
        DO(start(comm, transfer_of(RC_SEND, data.data(), data.size(), RC_INT32, 1, 0), &work));
        while (answered.load() == before) std::this_thread::yield();
        DO(finish(work, 10));
        for (uint64_t i = 0; i < PACKETS; ++i) DO(run(comm, transfer_of(RC_RECV, data.data(), 1, RC_INT32, 1, 1)));
    } else {
        await_report(comm, "send(int32 x 5000");
        for (uint64_t i = 0; i < PACKETS; ++i) DO(run(comm, transfer_of(RC_SEND, data.data(), 1, RC_INT32, 0, 1)));
        DO(message(comm, data, 0));
        CHECK(data[4999] == 0);
        ++answered;
        await_report(comm, "recv(int32 x 1,");
    }
}

void a_thread_gets_what_another_one_sends_to_its_own_rank(rc_comm* comm, int) {
    for (int i = 0; i < 20; ++i) {
        std::vector<int> received(100), sent(100, i);
        std::thread receiver([&] { DO(run(comm, transfer_of(RC_RECV, received.data(), 100, RC_INT32, 0, 7))); });
        DO(run(comm, transfer_of(RC_SEND, sent.data(), 100, RC_INT32, 0, 7)));
        receiver.join();
        CHECK(received == sent);
    }
    std::vector<int> ten(10), three(3);
    const uint64_t counts[] = {10, 3};
    CHECK(run(comm, RC_ALL_TO_ALL, ten.data(), three.data(), 0, RC_INT32, RC_SUM, 0, counts) == RC_MISMATCH);
}

// A rank aborts during a call; its arrays are freed at once, while peers may be accessing them.
void the_arrays_of_a_failed_call_may_be_freed(rc_comm* comm, int rank, int delay) {
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

// The same with a symmetric buffer, which a rank may use otherwise as soon as its call has failed.
void no_peer_writes_to_a_rank_whose_call_has_failed(rc_comm* comm, int rank, int delay) {
    constexpr uint64_t COUNT = 1 << 20;
    static std::atomic<int> left{0};
    SymmetricBuffer all(comm, rank, 3, 3 * COUNT);
    left = 0;
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    std::vector<int> data(COUNT, rank);
    std::thread aborter([&] {
        for (int i = 0; i < delay; ++i) std::this_thread::yield();
        if (rank == 0) DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
    });
    const int status = run(comm, RC_ALL_GATHER, data.data(), all.data, COUNT);
    CHECK(status == RC_OK || status == RC_ABORTED);
    std::fill(all.data, all.data + 3 * COUNT, -1);
    for (++left; left < 3;) std::this_thread::yield();
    CHECK(std::all_of(all.data, all.data + 3 * COUNT, [](int value) { return value == -1; }));
    aborter.join();
}

}  // namespace

int main() {
    in_world(3, small_tuning(), closing_wakes_the_waiters_of_this_rank);
    in_world(3, small_tuning(), an_abort_ends_every_wait);
    in_world(3, impatient(), a_late_rank_gets_the_first_reason);
    in_world(3, small_tuning(), a_deadline_in_the_background_is_kept);
    in_world(3, small_tuning(), a_receive_from_any_ignores_ranks_that_closed);
    in_world(2, small_tuning(), a_rank_that_is_about_to_close_is_not_waited_for);
    in_world(3, small_tuning(), many_threads_receive_from_any);
    for (int i = 0; i < 5; ++i) in_world(3, small_tuning(DIRECT), memory_is_not_read_after_its_owner_was_woken);
    for (int i = 0; i < 50; ++i) in_world(2, small_tuning(), an_answer_that_finds_no_room_is_not_lost);
    in_world(1, small_tuning(), a_thread_gets_what_another_one_sends_to_its_own_rank);
    for (Access access : {STAGED, DIRECT, CMA}) {
        for (int delay = 1; delay < 10'000; delay *= 2) {
            in_world(3, small_tuning(access),
                     [delay](rc_comm* comm, int rank) { the_arrays_of_a_failed_call_may_be_freed(comm, rank, delay); });
        }
    }
    for (int delay = 1; delay < 10'000; delay *= 2) {
        in_world(3, small_tuning(DIRECT), [delay](rc_comm* comm, int rank) {
            no_peer_writes_to_a_rank_whose_call_has_failed(comm, rank, delay);
        });
    }
    printf("test_failures: %d failures\n", failures.load());
    return failures != 0;
}
