// The flight record: the last calls of a rank. Its peers may read it while the rank writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ringcomm {

constexpr int FLIGHT_CALLS = 1024;

struct alignas(64) FlightEntry {
    std::atomic<uint64_t> number;  // written last; 0 while the entry changes
    std::atomic<uint64_t> signature;
    std::atomic<uint64_t> epoch;  // of a message its tag
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> start;  // ns, tick_ns()
    std::atomic<uint64_t> end;    // 0 while the call runs
    std::atomic<uint32_t> status;
    std::atomic<int32_t> waited_for;  // of a call that failed: the rank for which it last waited + 1, or 0
};

// A call as a reader has found it.
struct FlightCall {
    uint64_t signature, count, epoch, start, end;
    uint32_t status;
    int32_t waited_for;

    std::string describe() const;  // what was called
};

// A call in a report, which may come from another host: its times count from the moment of the report.
struct ReportedCall {
    FlightCall call;
    uint64_t took_ns, ago_ns;  // how long it took, or has run; since its end

    bool running() const { return !call.end; }
    std::string text() const;
    std::string json(int waits_for) const;  // as long as it runs; one that has failed knows for whom it waited
};

// What a rank does: a line for people, or one of JSON for programs.
struct RankReport {
    int rank;
    std::string state;                // "closed", "dead", "no answer" and the like; "" if it runs
    int waits_for = -1;               // in the calls that run
    std::vector<ReportedCall> calls;  // the running ones, then those that have ended, the last first
    bool answered = true;             // whether these are all

    std::string text() const;
    std::string json() const;
};

// All zero at first, like any range of shared memory.
struct FlightRecord {
    std::atomic<uint64_t> flights;
    std::atomic<uint64_t> bytes;            // of the arrays of all calls; two threads at once may lose some
    std::atomic<uint64_t> epoch;            // of the last collective
    std::atomic<int32_t> waits_for;         // a rank + 1, or 0; set only by a long wait
    std::atomic<int32_t> waits_for_member;  // the same by its rank in the world
    std::atomic<int32_t> waited_for;        // the last one, and how many calls had begun then
    std::atomic<uint64_t> waited_at;
    FlightEntry entries[FLIGHT_CALLS];

    // Return the number of the call, and take it. `epoch`: of a message its tag.
    uint64_t start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start);
    void end(uint64_t number, int status);
    void resume(uint64_t number);  // a call that has ended: it runs until its next end()
    void count_bytes(uint64_t more) {
        bytes.store(bytes.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    }
    void set_waits_for(int peer, int member) {
        waits_for.store(peer + 1, std::memory_order_relaxed);
        waits_for_member.store(member + 1, std::memory_order_relaxed);
        if (peer < 0) return;
        waited_for.store(peer + 1, std::memory_order_relaxed);
        waited_at.store(flights.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
    void clear_waits_for() { set_waits_for(-1, -1); }

    // The running calls, however old, and the last `most` that have ended.
    std::vector<ReportedCall> last(int most) const;
    // The oldest of the calls that run: it may make the others.
    std::optional<FlightCall> running() const;
    // Nothing if it has been overwritten, or is being written.
    std::optional<FlightCall> read(uint64_t number) const;
};

}  // namespace ringcomm
