// Sends that their receiver makes no room for, and are buffered: blocking and asynchronous ones, from several threads,
// in the order in which they were sent, also while the communicator closes. And messages as MPI matches them: receives
// of any length, probes, messages taken by them, synchronous sends and cancel, from several threads at once.
#include <algorithm>
#include <cstring>

#include "memory/layout.h"
#include "world.h"

using ringcomm::PACKETS;

namespace {

constexpr int MANY = 4 * PACKETS;

int send(rc_comm* comm, const int& value, int64_t tag, rc_work** work = nullptr) {
    const rc_transfer sent = transfer_of(RC_SEND, &value, 1, RC_INT32, 1, tag);
    return work ? start(comm, sent, work) : run(comm, sent);
}

int receive(rc_comm* comm, int64_t tag) {
    int value = -1;
    DO(run(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 0, tag)));
    return value;
}

// The asynchronous sends wait in the queue, the blocking one is buffered behind them; then they are waited for in
// another order than they were sent.
void waits_in_any_order(rc_comm* comm, int rank) {
    std::vector<int> values(MANY);
    std::vector<rc_work*> works(MANY);
    for (int i = 0; i < MANY; ++i) values[i] = i;
    if (rank == 0) {
        for (int i = 0; i < MANY - 1; ++i) DO(send(comm, values[i], 0, &works[i]));
        DO(send(comm, values[MANY - 1], 0));
        for (int i = MANY - 2; i >= 0; i -= 2) DO(finish(works[i]));
        for (int i = MANY - 3; i >= 0; i -= 2) DO(finish(works[i]));
        values.assign(MANY, -1);  // nobody reads them any more
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    for (int i = 0; rank == 1 && i < MANY; ++i) CHECK(receive(comm, 0) == i);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

void two_threads_send(rc_comm* comm, int rank) {
    if (rank == 0) {
        const auto send_all = [&](int64_t tag) {
            for (int i = 0; i < MANY; ++i) DO(send(comm, i, tag));
        };
        std::thread other(send_all, 2);
        send_all(1);
        other.join();
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    for (int64_t tag = 2; rank == 1 && tag > 0; --tag) {
        for (int i = 0; i < MANY; ++i) CHECK(receive(comm, tag) == i);
    }
}

// A large message waits behind the buffered ones. Rank 0 closes at the end, with messages that nobody has received.
void large_behind_small(rc_comm* comm, int rank) {
    std::vector<int> large(100'000, rank);
    rc_work* work = nullptr;
    if (rank == 0) {
        for (int i = 0; i < MANY; ++i) DO(send(comm, i, 3));
        DO(start(comm, transfer_of(RC_SEND, large.data(), large.size(), RC_INT32, 1, 3), &work));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) {
        DO(finish(work));
        for (int i = 0; i < MANY; ++i) DO(send(comm, i, 4));
        return;
    }
    for (int i = 0; i < MANY; ++i) CHECK(receive(comm, 3) == i);
    DO(run(comm, transfer_of(RC_RECV, large.data(), large.size(), RC_INT32, 0, 3)));
    CHECK(large[0] == 0 && large.back() == 0);
    for (int i = 0; i < MANY; ++i) CHECK(receive(comm, 4) == i);
}

constexpr uint64_t SMALL = 24, LARGE = 300'000, TOO_LONG = 400'000, ROOM = 350'000;  // bytes

char letter(int rank, int64_t tag) { return char('a' + (rank * 7 + tag) % 26); }

void check_message(const std::vector<char>& target, const rc_message& message, int source, int64_t tag) {
    CHECK(message.source == source && message.tag == tag && !message.cancelled);
    const auto end = target.begin() + message.bytes;
    CHECK(std::count(target.begin(), end, letter(source, tag)) == int64_t(message.bytes));
    CHECK(std::count(end, target.end(), '.') == target.end() - end);
}

// Sends `rounds` messages of each kind with one tag: short, long, and too long for any receive; every other one
// synchronous, some of them asynchronous.
void send_messages(rc_comm* comm, int rank, int peer, int64_t tag, int rounds) {
    const std::vector<char> data(TOO_LONG, letter(rank, tag));
    std::vector<rc_work*> works;
    for (int i = 0; i < rounds; ++i) {
        for (const uint64_t bytes : {SMALL, LARGE, TOO_LONG}) {
            const int kind = i % 2 ? RC_SEND_SYNCHRONOUS : RC_SEND;
            const rc_transfer sent = transfer_of(kind, data.data(), bytes, RC_UINT8, peer, tag);
            DO(i % 3 ? run(comm, sent) : start(comm, sent, &works.emplace_back()));
        }
    }
    for (rc_work* work : works) DO(finish(work));
}

// Receives them in one of five ways. What is too long fails alone.
void receive_messages(rc_comm* comm, int source, int64_t tag, int rounds) {
    const int any = -1;
    std::vector<char> target(ROOM);
    for (int i = 0; i < 3 * rounds; ++i) {
        target.assign(ROOM, '.');
        rc_message message{}, probed{};
        int found = 0, outcome = RC_OK;
        const auto from = [&](int kind, int peer, uint64_t bytes) {
            return transfer_of(kind, target.data(), bytes, RC_UINT8, peer, tag);
        };
        const int way = i % 5;
        if (way == 1) {
            const rc_transfer probe = from(RC_PROBE, any, 0);
            DO(rc_transfer_run(comm, &probe, &probed));
            CHECK(probed.source == source && probed.tag == tag);
            found = 1;
        } else if (way == 2) {
            const rc_transfer take = from(RC_TAKE, source, 0);
            while (!found) DO(rc_poll(comm, &take, &found, &probed));
        } else if (way == 3) {
            const rc_transfer short_one = from(RC_RECV_OR_TAKE, any, SMALL);
            DO(rc_transfer_run(comm, &short_one, &message));
            CHECK((message.taken == 0) == (message.bytes == SMALL) && message.source == source && message.tag == tag);
        }
        const uint64_t taken = way == 3 ? message.taken : probed.taken;
        if (way == 4) {
            rc_work* work = nullptr;
            DO(start(comm, from(RC_RECV_MESSAGE, any, ROOM), &work));
            outcome = rc_work_wait(work, -1, nullptr);
            DO(rc_work_message(work, &message));
            rc_work_free(work);
        } else if (way != 3 || taken) {
            rc_transfer receive = from(RC_RECV_MESSAGE, source, ROOM);
            receive.taken = taken;
            outcome = rc_transfer_run(comm, &receive, &message);
        }
        const uint64_t bytes[] = {SMALL, LARGE, TOO_LONG};
        if (i % 3 == 2) {
            CHECK(outcome == RC_MISMATCH && target[0] == '.');
        } else {
            DO(outcome);
            CHECK(message.bytes == bytes[i % 3]);
            check_message(target, message, source, tag);
        }
        CHECK(!found || probed.bytes == bytes[i % 3]);
    }
}

// One thread withdraws receives that another one waits for, while the peer sends to some of them.
void cancel_receives(rc_comm* comm, int rank, int peer) {
    constexpr int64_t TAG = 50;
    constexpr int NUMBER = 40;
    if (rank == 1) {
        for (int i = 0; i < NUMBER; ++i) DO(run(comm, transfer_of(RC_SEND, &i, 1, RC_INT32, peer, TAG)));
        return;
    }
    int received = 0;
    for (int left = NUMBER; left > 0;) {
        int value = -1, cancelled = 0;
        rc_work* work = nullptr;
        DO(start(comm, transfer_of(RC_RECV_MESSAGE, &value, 1, RC_INT32, peer, TAG), &work));
        std::thread waiting([&] { DO(rc_work_wait(work, -1, nullptr)); });
        DO(rc_cancel(work, &cancelled));
        waiting.join();
        rc_message message{};
        DO(rc_work_message(work, &message));
        rc_work_free(work);
        CHECK(message.cancelled == cancelled && value == (cancelled ? -1 : received));
        if (cancelled) continue;
        ++received;
        --left;
    }
}

void matched_as_mpi_does(rc_comm* comm, int rank) {
    constexpr int ROUNDS = 12, TAGS = 3;
    std::vector<std::thread> threads;
    for (int64_t tag = 10; tag < 10 + TAGS; ++tag) {
        threads.emplace_back([=] { send_messages(comm, rank, 1 - rank, tag, ROUNDS); });
        threads.emplace_back([=] { receive_messages(comm, 1 - rank, tag, ROUNDS); });
    }
    for (std::thread& thread : threads) thread.join();
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    cancel_receives(comm, rank, 1 - rank);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
}

// One thread sends to its own rank and another one receives.
void to_oneself(rc_comm* comm, int rank) {
    std::thread sender([=] { send_messages(comm, rank, rank, 30, 6); });
    receive_messages(comm, rank, 30, 6);
    sender.join();
}

}  // namespace

int main() {
    for (int round = 0; round < 5; ++round) {
        in_world(2, small_tuning(), [](rc_comm* comm, int rank) {
            waits_in_any_order(comm, rank);
            two_threads_send(comm, rank);
            large_behind_small(comm, rank);
        });
    }
    for (const Access access : {STAGED, DIRECT, CMA}) {
        in_world(2, small_tuning(access), [](rc_comm* comm, int rank) {
            matched_as_mpi_does(comm, rank);
            to_oneself(comm, rank);
        });
    }
    return failures.load() != 0;
}
