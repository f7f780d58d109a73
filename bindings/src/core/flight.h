// The flight record: the last calls of a rank. Its peers may read it while the rank writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace ringcomm {

constexpr int FLIGHT_CALLS = 1024;

struct alignas(64) FlightEntry {
    std::atomic<uint64_t> number;  // written last; 0 while the entry changes
    std::atomic<uint64_t> signature;
    std::atomic<uint64_t> epoch;
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> start;  // ns, tick_ns()
    std::atomic<uint64_t> end;    // 0 while the call runs
    std::atomic<uint32_t> status;
};

// All zero at first, like any range of shared memory.
struct FlightRecord {
    std::atomic<uint64_t> flights;
    std::atomic<uint64_t> bytes;     // of the arrays of all calls; two threads at once may lose some
    std::atomic<int32_t> waits_for;  // a rank + 1, or 0; set only by a long wait
    FlightEntry entries[FLIGHT_CALLS];

    // Return the number of the call, and take it.
    uint64_t start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start);
    void end(uint64_t number, int status);
    void count_bytes(uint64_t more) {
        bytes.store(bytes.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    }
    void set_waits_for(int peer) { waits_for.store(peer + 1, std::memory_order_relaxed); }
    void clear_waits_for() { waits_for.store(0, std::memory_order_relaxed); }

    // The last `calls` calls that ended, and those that run: " …; …".
    std::string describe(int calls) const;
};

}  // namespace ringcomm
