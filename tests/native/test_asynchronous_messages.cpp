// Asynchronous messages: many in flight at once, of all sizes and between all ranks, waited for in any order; and what
// starts the thread that moves them while nobody waits.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

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
        DO(rc_send(comm, m.data.data(), m.data.size(), RC_UINT8, m.peer, 7, -1, &m.work));
    };
    const auto receive = [&](Message& m) {
        DO(rc_recv(comm, m.data.data(), m.data.size(), RC_UINT8, m.peer, 7, -1, nullptr, &m.work));
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

int progress_threads() {
    int found = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(thread.path() / "comm"), name);
        found += name == "ringcomm-p2p";
    }
    return found;
}

// A send that finds room is done when the call returns; a receive of a small message holds up nobody, nor does one
// whose message is there already.
void what_nobody_waits_for_starts_the_thread(rc_comm* comm, int rank) {
    int value = rank;
    rc_work* work = nullptr;
    if (rank == 0) {
        DO(rc_send(comm, &value, 1, RC_INT32, 1, 0, -1, &work));
        DO(finish(work));
        DO(rc_send(comm, &value, 1, RC_INT32, 0, 0, -1, &work));
        DO(finish(work));
        DO(rc_recv(comm, &value, 1, RC_INT32, 0, 0, -1, nullptr, nullptr));
        CHECK(progress_threads() == 0);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 1) {
        DO(rc_recv(comm, &value, 1, RC_INT32, 0, 0, -1, nullptr, nullptr));
        CHECK(value == 0 && progress_threads() == 0);
        DO(rc_recv(comm, &value, 1, RC_INT32, 0, 1, -1, nullptr, &work));
        CHECK(progress_threads() == 0);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    std::vector<int> large(100'000);
    if (rank == 0) {
        value = 5;
        DO(rc_send(comm, &value, 1, RC_INT32, 1, 1, -1, nullptr));
        DO(rc_send(comm, &value, 1, RC_INT32, 1, 2, -1, nullptr));
    } else {
        DO(finish(work));
        CHECK(value == 5);
        int found;
        DO(rc_probe(comm, 0, 2, 1, -1, &found, nullptr, nullptr));
        DO(rc_recv_message(comm, large.data(), large.size() * sizeof(int), 0, 2, 0, -1, nullptr, &work));
        CHECK(rc_work_ended(work) && large[0] == 5 && progress_threads() == 0);
        DO(finish(work));
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) {
        DO(rc_recv(comm, large.data(), large.size(), RC_INT32, 1, 3, -1, nullptr, &work));
        CHECK(progress_threads() == 1);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 1) DO(rc_send(comm, large.data(), large.size(), RC_INT32, 0, 3, -1, nullptr));
    if (rank == 0) DO(finish(work));
}

// Who is told of the end of a receive, or drops it, does not make calls for it.
void callbacks_start_the_thread(rc_comm* comm, int rank) {
    int value = 7;
    rc_work* work = nullptr;
    if (rank == 1) {
        DO(rc_recv(comm, &value, 1, RC_INT32, 0, 0, -1, nullptr, &work));
        CHECK(progress_threads() == 0);
        DO(rc_work_notify(work, 42));
        CHECK(progress_threads() == 1);
    }
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    if (rank == 0) DO(rc_send(comm, &value, 1, RC_INT32, 1, 0, -1, nullptr));
    if (rank == 1) {
        CHECK(rc_next_done(60.0) == 42);
        DO(finish(work));
    }
}

}  // namespace

int main() {
    in_world(2, small_tuning(), what_nobody_waits_for_starts_the_thread);
    in_world(2, small_tuning(), callbacks_start_the_thread);
    for (const Access access : {STAGED, DIRECT, CMA}) {
        in_world(RANKS, small_tuning(access), [](rc_comm* comm, int rank) {
            for (uint32_t seed = 0; seed < 5; ++seed) many_in_flight(comm, rank, seed);
        });
    }
    return failures.load() != 0;
}
