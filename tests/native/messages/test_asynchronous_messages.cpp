// Asynchronous messages: many in flight at once, of all sizes and between all ranks, waited for in any order; and what
// starts the thread that moves them while nobody waits.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "world.h"

namespace {

constexpr int RANKS = 3;
// Bytes; those of 9,000 fill the ring, and what follows must not overtake them.
constexpr uint64_t SIZES[] = {1, 100, 5'000, 60'000, 9'000, 9'000, 9'000, 24, 0, 150'000, 400'000, 300'001};

unsigned char letter(int source, int target, size_t message) {
    return static_cast<unsigned char>(1 + source * 60 + target * 20 + message);
}

struct Message {
    int peer;
    std::vector<unsigned char> data;
    rc_work* work = nullptr;
};

// Every rank sends all sizes to every rank, also to itself, with one tag: what comes from a rank comes in order.
void many_in_flight(rc_comm* comm, int rank, uint32_t seed) {
    std::mt19937 random(seed * RANKS + rank);
    std::vector<Message> sent, received;
    for (int peer = 0; peer < RANKS; ++peer) {
        for (size_t i = 0; i < std::size(SIZES); ++i) {
            sent.push_back({peer, std::vector(SIZES[i], letter(rank, peer, i))});
            received.push_back({peer, std::vector<unsigned char>(SIZES[i])});
        }
    }
    const auto send = [&](Message& m) {
        DO(start(comm, transfer_of(RC_SEND, m.data.data(), m.data.size(), RC_UINT8, m.peer, 7), &m.work));
    };
    const auto receive = [&](Message& m) {
        DO(start(comm, transfer_of(RC_RECV, m.data.data(), m.data.size(), RC_UINT8, m.peer, 7), &m.work));
    };
    size_t next_sent = 0, next_received = 0;
    while (next_sent < sent.size() || next_received < received.size()) {
        const bool sends = next_received == received.size() || (next_sent < sent.size() && random() % 2);
        sends ? send(sent[next_sent++]) : receive(received[next_received++]);
    }
    std::vector<rc_work*> works;
    for (const Message& m : sent) works.push_back(m.work);
    for (const Message& m : received) works.push_back(m.work);
    std::shuffle(works.begin(), works.end(), random);
    for (rc_work* work : works) DO(finish(work));
    for (size_t i = 0; i < received.size(); ++i) {
        const auto& [peer, data, work] = received[i];
        const unsigned char expected = letter(peer, rank, i % std::size(SIZES));
        CHECK(std::count(data.begin(), data.end(), expected) == int64_t(data.size()));
    }
}

// A ring of prepared transfers, small and large, that are started and waited for again and again.
void prepared_transfers(rc_comm* comm, int rank) {
    constexpr int ROUNDS = 30;
    const int left = (rank + RANKS - 1) % RANKS, right = (rank + 1) % RANKS;
    std::vector<Message> transfers;  // pairs of a receive and a send
    for (const uint64_t bytes : {8, 9'000, 300'001}) {
        for (const int peer : {left, right}) transfers.push_back({peer, std::vector<unsigned char>(bytes)});
    }
    std::vector<rc_work*> works;
    for (size_t i = 0; i < transfers.size(); ++i) {
        Message& m = transfers[i];
        const int kind = i % 2 == 0 ? RC_RECV_MESSAGE : i == 3 ? RC_SEND_SYNCHRONOUS : RC_SEND;
        const rc_transfer transfer = transfer_of(kind, m.data.data(), m.data.size(), RC_UINT8, m.peer, int64_t(i / 2));
        DO(rc_transfer_prepare(comm, &transfer, &m.work));
        CHECK(rc_work_ended(m.work));
        works.push_back(m.work);
    }
    int started = -1;
    for (int round = 0; round < ROUNDS; ++round) {
        for (size_t i = 1; i < transfers.size(); i += 2) {
            std::ranges::fill(transfers[i].data, letter(rank, right, round));
        }
        DO(rc_start_all(works.data(), int(works.size()), &started));
        CHECK(started == int(works.size()));
        for (rc_work* work : works) DO(rc_work_wait(work, -1, nullptr));
        for (size_t i = 0; i < transfers.size(); i += 2) {
            const std::vector<unsigned char>& data = transfers[i].data;
            CHECK(std::count(data.begin(), data.end(), letter(left, rank, round)) == int64_t(data.size()));
        }
    }
    // Refused, before any starts: one work twice, a second start, and a work that was not prepared.
    rc_work* const twice[] = {works[0], works[1], works[0]};
    CHECK(rc_start_all(twice, 3, &started) == RC_ARGUMENT && started == 0);
    CHECK(std::string(rc_last_error()->message) == "works[2]: expected another work than before");
    CHECK(rc_work_ended(works[0]) && rc_work_ended(works[1]));
    DO(rc_start_all(twice, 1, &started));
    CHECK(rc_start_all(&works[0], int(works.size()), &started) == RC_ARGUMENT && started == 0);
    DO(start(comm, transfer_of(RC_SEND, nullptr, 0, RC_UINT8, rank, 99), &works[0]));
    CHECK(rc_start_all(works.data(), 1, &started) == RC_ARGUMENT && started == 0);
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));  // nothing had arrived before
    works.push_back(twice[0]);
    DO(rc_start_all(&works[1], 1, &started));
    for (rc_work* work : works) DO(finish(work));
}

int progress_threads() {
    int found = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(thread.path() / "comm"), name);
        found += name == "ringcomm-p2p";
    }
    return found;
}

// A send that finds room is done when the call returns; a receive whose message is there already holds up nobody.
void what_nobody_waits_for_starts_the_thread(rc_comm* comm, int rank) {
    int value = rank;
    rc_work* work = nullptr;
    if (rank == 0) {
        DO(start(comm, transfer_of(RC_SEND, &value, 1, RC_INT32, 1, 0), &work));
        DO(finish(work));
        DO(start(comm, transfer_of(RC_SEND, &value, 1, RC_INT32, 0, 0), &work));
        DO(finish(work));
        DO(run(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 0, 0)));
        CHECK(progress_threads() == 0);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 1) {
        DO(run(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 0, 0)));
        CHECK(value == 0 && progress_threads() == 0);
    }
    std::vector<int> large(100'000);
    if (rank == 0) {
        value = 5;
        DO(run(comm, transfer_of(RC_SEND, &value, 1, RC_INT32, 1, 2)));
    } else {
        DO(run(comm, transfer_of(RC_PROBE, nullptr, 0, RC_INT32, 0, 2)));
        DO(start(comm, transfer_of(RC_RECV_MESSAGE, large.data(), large.size(), RC_INT32, 0, 2), &work));
        CHECK(rc_work_ended(work) && large[0] == 5 && progress_threads() == 0);
        DO(finish(work));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) {
        DO(start(comm, transfer_of(RC_RECV, large.data(), large.size(), RC_INT32, 1, 3), &work));
        CHECK(progress_threads() == 1);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 1) DO(run(comm, transfer_of(RC_SEND, large.data(), large.size(), RC_INT32, 0, 3)));
    if (rank == 0) DO(finish(work));
}

// A synchronous send ends while its receiver makes no calls.
void a_posted_receive_starts_the_thread(rc_comm* comm, int rank) {
    int value = 7;
    rc_work* work = nullptr;
    if (rank == 1) {
        DO(start(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 0, 0), &work));
        CHECK(progress_threads() == 1);
    }
    static std::atomic<bool> sent{false};
    if (rank == 0) {
        DO(run(comm, transfer_of(RC_SEND_SYNCHRONOUS, &value, 1, RC_INT32, 1, 0)));
        sent = true;
    } else {
        while (!sent) std::this_thread::yield();
        DO(finish(work));
    }
}

// Who is told of the end of a receive does not make calls for it.
void callbacks_end_a_receive(rc_comm* comm, int rank) {
    int value = 7;
    rc_work* work = nullptr;
    if (rank == 1) {
        DO(start(comm, transfer_of(RC_RECV, &value, 1, RC_INT32, 0, 0), &work));
        DO(rc_work_notify(work, 42));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) DO(run(comm, transfer_of(RC_SEND, &value, 1, RC_INT32, 1, 0)));
    if (rank == 1) {
        CHECK(rc_next_done(60.0) == 42);
        DO(finish(work));
    }
}

}  // namespace

int main() {
    in_world(2, small_tuning(), what_nobody_waits_for_starts_the_thread);
    in_world(2, small_tuning(), a_posted_receive_starts_the_thread);
    in_world(2, small_tuning(), callbacks_end_a_receive);
    for (const Access access : {STAGED, DIRECT, CMA}) {
        in_world(RANKS, small_tuning(access), [](rc_comm* comm, int rank) {
            for (uint32_t seed = 0; seed < 5; ++seed) many_in_flight(comm, rank, seed);
            prepared_transfers(comm, rank);
        });
    }
    return failures.load() != 0;
}
