// The machine as kernels see it, for three compilers: nvcc and NVRTC include device.cuh, g++ includes emulated.cuh, and
// the kernels have one source for all of them.
//
//   Ctx                                     thread, threads, block, blocks
//   WARP                                    threads that access memory together; a block is a multiple of it
//   block_any(ctx, mine), block_all         a barrier of the block; whether `mine` holds for any or all of its threads
//   block_sync(ctx)                         the barrier alone
//   block_or(ctx, mine)                     a barrier; the bits that any of its threads has set
//   block_sum(ctx, mine)                    two barriers; the sum over its threads, in one order
//   block_words(ctx)                        32 words that the threads of a block share; undefined at first
//   load_acquire, store_release             64-bit flags that order other memory, for all ranks (system scope)
//   load_relaxed, store_relaxed             32 and 64-bit words without order
//   load_pair, store_pair                   two 64-bit words in one access of 16 bytes, without order; each comes whole
//   claim(word)                             true for the first thread of the rank that calls it
//   last_of(word, n)                        true for the last of n callers, after all that they did; zeroes the word
//   load16, store16                         one access of 16 bytes, which must be aligned
//   narrow_float16x2(low, high), …          two floats rounded to nearest-even, as a pair of small ones, `low` in the
//                                           lower half; narrow_e4m3x2 and narrow_e5m2x2 have no infinities: what is
//                                           too large becomes the largest number. Each NaN becomes one.
//   widen_float16x2, float16x2_of_e4m3x2    a pair as floats, or as float16
//   CONVERTS_FLOAT8                         whether there are those of float8
//   HAS_MULTIMEM                            whether there are the next three (nvls.cuh)
//   multimem_sum(math, copies, at)          the sum of 16 bytes of all ranks, by the switch
//   multimem_store(copies, at, pack)        writes 16 bytes to all ranks
//   multimem_fence()                        orders them and other accesses to the same memory, of this thread
//   square_root(x)                          of a float, rounded to nearest
//   now_ns, pause(spins)                    a clock; the pause between two loads of a flag
//
// RC_DEVICE is inlined. RC_NOINLINE is not: loops over memory get registers of their own that way, and spill none.
// RC_NO_UNROLL keeps the compiler from unrolling a loop, which would take registers too.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#include <cstring>
#endif

namespace ringcomm::cuda {

using byte = unsigned char;

struct alignas(16) Pack {
    uint32_t word[4];
};
constexpr uint64_t PACK = sizeof(Pack);

// Each store that makes memory visible to another rank has a number. A build with RC_WEAKEN can drop the order of one
// of them; ThreadSanitizer must then report a race, which proves that the tests detect it.
enum DeviceSite : int {
    SITE_START = 1,         // a rank has ended its last call and started this one; publishes what it staged
    SITE_TAIL,              // a slot is filled
    SITE_HEAD,              // a slot may be filled again
    SITE_MESSAGE_STAGED,    // a piece of a message lies in a block
    SITE_MESSAGE_RELEASED,  // the block of a message may be filled again
    SITE_END
};

// The sums that a switch makes.
enum MultimemSum { NO_MULTIMEM_SUM, MULTIMEM_FLOAT32, MULTIMEM_FLOAT16, MULTIMEM_BFLOAT16 };

}  // namespace ringcomm::cuda

#ifdef __CUDACC__
#include "device.cuh"
#else
#include "emulated.cuh"
#endif

namespace ringcomm::cuda {

RC_DEVICE void block_sync(const Ctx& ctx) { block_any(ctx, false); }
RC_DEVICE bool block_all(const Ctx& ctx, bool mine) { return !block_any(ctx, !mine); }

template <class To, class From>
RC_DEVICE To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

RC_DEVICE constexpr uint64_t minimum(uint64_t a, uint64_t b) { return a < b ? a : b; }
RC_DEVICE constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
RC_DEVICE constexpr uint64_t round_up(uint64_t a, uint64_t b) { return divide_up(a, b) * b; }

}  // namespace ringcomm::cuda
