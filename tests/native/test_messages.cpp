// Sends that their receiver makes no room for, and are buffered: blocking and asynchronous ones, from several threads,
// in the order in which they were sent, also while the communicator closes.
#include <cstring>

#include "shm/layout.h"
#include "world.h"

using ringcomm::PACKETS;

namespace {

constexpr int MANY = 4 * PACKETS;

int send(rc_comm* comm, const int& value, int64_t tag, rc_work** work = nullptr) {
    return rc_send(comm, &value, 1, RC_INT32, 1, tag, -1, work);
}

int receive(rc_comm* comm, int64_t tag) {
    int value = -1;
    DO(rc_recv(comm, &value, 1, RC_INT32, 0, tag, -1, nullptr, nullptr));
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
        DO(rc_send(comm, large.data(), large.size(), RC_INT32, 1, 3, -1, &work));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) {
        DO(finish(work));
        for (int i = 0; i < MANY; ++i) DO(send(comm, i, 4));
        return;
    }
    for (int i = 0; i < MANY; ++i) CHECK(receive(comm, 3) == i);
    DO(rc_recv(comm, large.data(), large.size(), RC_INT32, 0, 3, -1, nullptr, nullptr));
    CHECK(large[0] == 0 && large.back() == 0);
    for (int i = 0; i < MANY; ++i) CHECK(receive(comm, 4) == i);
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
    return failures.load() != 0;
}
