// The trace of a rank: an entry for each call, in a file that outlives the rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/waiting.h"

namespace ringcomm {

// The clock of entries: a call of 1 KiB takes less than a microsecond, and reading now_ns() four times 5 % of that.
inline uint64_t ticks() {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return now_ns();
#endif
}

// What ringcomm/trace/files.py reads. Times are in ticks(), on a GPU in ns.
struct alignas(64) TraceEntry {
    uint64_t signature;  // as in the flight record, or one of TRACE_…
    uint64_t start, end;
    union {
        struct {
            uint64_t count;  // of elements: CallRecord::elements()
            uint64_t epoch;
            uint64_t waited;      // for other ranks
            uint32_t path;        // chunks × RC_PATHS + rc_path
            int16_t late;         // the rank for which it waited longest, -1: for none
            int8_t status;        // rc_status
            uint8_t queued;       // another thread, or a GPU, may have run it, while its caller did other things
            uint32_t waited_256;  // for that rank, in units of 256
        } call;
        char name[36];  // of a mark
        uint64_t ns;    // what now_ns() is at `start`
        struct {
            char content[36];
            uint32_t checksum;  // of the whole entry before it: Trace::store writes it
        } any;
    };
};
static_assert(sizeof(TraceEntry) == 64);
enum : uint64_t { TRACE_WAIT = ~uint64_t{2}, TRACE_CLOCK, TRACE_MARK };  // TRACE_WAIT: for a queued call
enum : uint8_t { TRACE_QUEUED = 1, TRACE_ON_GPU = 2 };                   // values of `queued`

// How long a collective has waited for other ranks.
struct Waits {
    uint64_t total = 0, longest = 0;  // ticks
    int late = -1;                    // the rank of the longest
    void add(uint64_t waited, int peer) {
        total += waited;
        if (waited > longest) longest = waited, late = peer;
    }
};

// Any number of threads add entries. The file is extended piece by piece; once it cannot be, entries are dropped, and
// counted in the last 8 bytes of the header. A call that has begun before its first look at the clock, or ends after
// its last one, is in the trace around it, if any. Each entry has a checksum, by which a reader knows damage, and an
// entry that is half written.
class Trace {
public:
    Trace(int fd, Trace* outer);  // duplicates `fd`; `outer` goes on when this one ends
    ~Trace();
    Trace(const Trace&) = delete;

    void add(const TraceEntry& entry, bool on_gpu = false);
    void end();  // other threads may still be adding entries

    Trace* const outer;

private:
    bool store(const TraceEntry& entry);
    TraceEntry add_clock();
    int extend(uint64_t entries);  // returns an errno

    int fd_;
    size_t mapped_ = size_t{1} << 32;  // bytes: 67 million calls
    std::byte* base_;
    std::atomic<uint64_t>* dropped_;
    std::atomic<uint64_t> count_{0}, room_{0};  // entries
    uint64_t began_ = 0, began_ns_ = 0;         // ticks, ns
    std::atomic<bool> over_{false};
    std::mutex extending_;
    int ended_ = 0;  // why the file is not extended any more: an errno
};

}  // namespace ringcomm
