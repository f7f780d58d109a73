// The vocabulary of memory order of the CPU kernels. That of the CUDA kernels is cuda/port.cuh.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringcomm {

using Flag = std::atomic<uint64_t>;

// Each store that makes data visible to another rank has a number. A build with RC_WEAKEN can drop the order of one of
// them; ThreadSanitizer must then report a race, which proves that the tests would notice.
enum Site : int {
    SITE_START = 1,  // start record: the record itself and what is laid beside it
    SITE_STAGED,     // a later chunk lies in the staging buffer
    SITE_REDUCED,    // the owner has read the staged inputs and published its result
    SITE_COLLECTED,  // the reader is through with a chunk: its buffer may be written again
    SITE_LETTER,     // point-to-point: a letter is in the ring
    SITE_TAKEN,      // point-to-point: letters have been read: their places may be written again
    SITE_END
};

#ifdef RC_WEAKEN
inline int weakened = 0;
#else
constexpr int weakened = 0;
#endif

// Sequentially consistent, not only release and acquire: a publisher looks for sleeping peers after it has published,
// and a sleeper looks at the flag after it has announced itself; one of the two must see the other.
template <Site site>
inline void publish(Flag& flag, uint64_t value) {
    flag.exchange(value, site == weakened ? std::memory_order_relaxed : std::memory_order_seq_cst);
}

inline uint64_t observe(const Flag& flag) { return flag.load(std::memory_order_seq_cst); }

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace ringcomm
