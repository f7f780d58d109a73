// Traces begin and end while other threads of the rank make calls: no call is lost, and none lies in two of them.
#include <sys/mman.h>

#include <cstring>

#include "core/trace.h"
#include "world.h"

using ringcomm::TraceEntry;

namespace {

constexpr int SIZE = 2, CALLS = 20'000, MESSAGES = 300;  // more than the first piece of a file has room for
constexpr size_t HEADER = 4096;

std::vector<TraceEntry> entries_of(int fd) {
    const off_t bytes = lseek(fd, 0, SEEK_END);
    std::vector<TraceEntry> entries((bytes - HEADER) / sizeof(TraceEntry));
    CHECK(pread(fd, entries.data(), entries.size() * sizeof(TraceEntry), HEADER) ==
          ssize_t(entries.size() * sizeof(TraceEntry)));
    std::erase_if(entries, [](const TraceEntry& entry) { return entry.end == 0; });
    return entries;
}

void on_rank(rc_comm* comm, int rank) {
    const int outer = memfd_create("outer", 0), inner = memfd_create("inner", 0);
    DO(rc_trace(comm, outer));
    std::thread messages([&] {
        int x = 1, y = 0;
        for (int i = 0; i < MESSAGES; ++i) {
            DO(rc_sendrecv(comm, &x, 1, RC_INT32, 1 - rank, &y, 1, RC_INT32, 1 - rank, 0, -1, nullptr));
        }
    });
    std::thread marks([&] {
        for (int i = 0; i < 20; ++i) {
            DO(rc_trace(comm, inner));
            DO(rc_trace_mark(comm, "mark"));
            DO(rc_trace(comm, -1));
        }
    });
    int x = 1;
    for (int i = 0; i < CALLS; ++i) DO(run(comm, RC_ALL_REDUCE, &x, &x, 1, RC_INT32, RC_MAX));
    messages.join();
    marks.join();
    DO(rc_trace(comm, -1));
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));  // is not recorded

    uint64_t epochs = 0, collectives = 0, sent = 0, marked = 0;
    for (const int fd : {outer, inner}) {
        for (const TraceEntry& entry : entries_of(fd)) {
            CHECK(entry.start <= entry.end);
            if (entry.signature == ringcomm::TRACE_MARK) {
                marked += fd == inner && strcmp(entry.name, "mark") == 0;
            } else if (entry.signature < ringcomm::TRACE_WAIT) {
                (entry.call.epoch ? collectives : sent) += 1;
                epochs += entry.call.epoch;
            }
        }
        close(fd);
    }
    CHECK(marked == 20);
    // The inner traces share a file, and each begins at its start, so later ones write over earlier ones.
    CHECK(collectives <= CALLS && epochs <= uint64_t(CALLS) * (CALLS + 1) / 2);
    CHECK(sent <= 2 * MESSAGES);
}

}  // namespace

int main() {
    in_world(SIZE, small_tuning(), on_rank);
    return failures;
}
