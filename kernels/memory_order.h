// Memory order: the primitives of the CPU core. Those of the CUDA kernels are in cuda/port.cuh.
#pragma once

#include <atomic>
#include <cstdint>
#ifdef RC_COUNT_LINES
#include <unordered_map>
#include <utility>
#endif

namespace ringcomm {

using Flag = std::atomic<uint64_t>;

// The stores that make data visible to another rank, by number. A build with RC_WEAKEN can drop the order of one of
// them; ThreadSanitizer must then report a race, which proves that the tests detect it.
enum Site : int {
    SITE_START = 1,  // the start record and its payload
    SITE_STAGED,     // a later chunk is in the staging buffer
    SITE_REDUCED,    // the owner has read the staged inputs and published its result
    SITE_COLLECTED,  // the reader is done with a chunk: its buffer may be reused
    SITE_PACKET,     // point-to-point: a packet is in the ring
    SITE_RELAY,      // what a rank passes on in the tree
    SITE_CONSUMED,   // point-to-point: packets are read: their room may be reused
    SITE_END
};

#ifdef RC_WEAKEN
inline int weakened = 0;
#else
constexpr int weakened = 0;
#endif

// A build with RC_COUNT_LINES counts the cache lines that each thread writes, and those that it reads after another has
// written them.
#ifdef RC_COUNT_LINES
struct CountedLines {
    uint64_t read = 0, written = 0;
    std::unordered_map<const Flag*, uint64_t> seen;

    void note(const Flag& flag, uint64_t value) {
        if (std::exchange(seen[&flag], value) != value) ++read;
    }
};
inline thread_local CountedLines counted_lines;
#endif

// Sequentially consistent, not just release and acquire: a publisher checks for sleepers after it has published, and a
// sleeper checks the flag after it has announced itself; one of them must see the other.
template <Site site>
inline void publish(Flag& flag, uint64_t value) {
    flag.exchange(value, site == weakened ? std::memory_order_relaxed : std::memory_order_seq_cst);
#ifdef RC_COUNT_LINES
    ++counted_lines.written;
#endif
}

inline uint64_t observe(const Flag& flag) {
    const uint64_t value = flag.load(std::memory_order_seq_cst);
#ifdef RC_COUNT_LINES
    counted_lines.note(flag, value);
#endif
    return value;
}

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace ringcomm
