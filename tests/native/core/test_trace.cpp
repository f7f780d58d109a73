// Traces begin and end while other threads of the rank make calls: no call is lost, none lies in two of them, and each
// in one that had begun before it, and ended after it.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/trace.h"
#include "world.h"

using ringcomm::TraceEntry;

namespace {

constexpr int SIZE = 2, MESSAGES = 300, TRACES = 20;
constexpr int CALLS = 20'000;  // more than the first piece of a file has room for
constexpr size_t HEADER = 4096;

std::vector<TraceEntry> entries_of(int fd) {
    const off_t bytes = lseek(fd, 0, SEEK_END);
    std::vector<TraceEntry> entries((bytes - HEADER) / sizeof(TraceEntry));
    CHECK(pread(fd, entries.data(), entries.size() * sizeof(TraceEntry), HEADER) ==
          ssize_t(entries.size() * sizeof(TraceEntry)));
    std::erase_if(entries, [](const TraceEntry& entry) { return entry.end == 0; });
    return entries;
}

struct Found {
    uint64_t collectives = 0, epochs = 0, messages = 0, marks = 0;
};

void count(int fd, Found& found) {
    const std::vector<TraceEntry> entries = entries_of(fd);
    uint64_t first = UINT64_MAX, last = 0;  // looks at the clock
    for (const TraceEntry& entry : entries) {
        if (entry.signature != ringcomm::TRACE_CLOCK) continue;
        first = std::min(first, entry.start);
        last = std::max(last, entry.start);
    }
    for (const TraceEntry& entry : entries) {
        CHECK(entry.start <= entry.end && entry.start >= first);
        CHECK(entry.signature == ringcomm::TRACE_CLOCK || entry.end <= last);
        if (entry.signature == ringcomm::TRACE_MARK) {
            found.marks += strcmp(entry.name, "mark") == 0;
        } else if (entry.signature < ringcomm::TRACE_WAIT) {
            (entry.call.epoch ? found.collectives : found.messages) += 1;
            found.epochs += entry.call.epoch;
        }
    }
    close(fd);
}

void on_rank(rc_comm* comm, int rank) {
    const int outer = memfd_create("outer", 0);
    std::vector<int> inner;
    DO(rc_trace(comm, outer));
    std::thread messages([&] {
        int x = 1, y = 0;
        for (int i = 0; i < MESSAGES; ++i) {
            DO(exchange(comm, transfer_of(RC_SEND, &x, 1, RC_INT32, 1 - rank, 0),
                        transfer_of(RC_RECV, &y, 1, RC_INT32, 1 - rank, 0)));
        }
    });
    std::thread traces([&] {
        for (int i = 0; i < TRACES; ++i) {
            inner.push_back(memfd_create("inner", 0));
            DO(rc_trace(comm, inner.back()));
            DO(rc_trace_mark(comm, "mark"));
            DO(rc_trace(comm, -1));
        }
    });
    int x = 1;
    for (int i = 0; i < CALLS; ++i) DO(run(comm, RC_ALL_REDUCE, &x, &x, 1, RC_INT32, RC_MAX));
    messages.join();
    traces.join();
    DO(rc_trace(comm, -1));
    DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));  // is not recorded

    Found found;
    count(outer, found);
    for (const int fd : inner) count(fd, found);
    CHECK(found.collectives == CALLS && found.epochs == uint64_t(CALLS) * (CALLS + 1) / 2);
    CHECK(found.messages == 2 * MESSAGES);
    CHECK(found.marks == TRACES);
}

}  // namespace

int main() {
    in_world(SIZE, small_tuning(), on_rank);
    return failures;
}
