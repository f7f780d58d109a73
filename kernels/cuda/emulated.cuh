// port.cuh on a CPU: each thread of a block is a real thread, a barrier a real barrier, a flag a real atomic. So
// ThreadSanitizer checks the kernels.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#define RC_DEVICE inline
#define RC_NOINLINE inline
#define RC_HOST_DEVICE inline
#define RC_NO_UNROLL
#define RC_UNROLL

namespace ringcomm::cuda {

#ifdef RC_WEAKEN
inline int weakened = 0;
#else
constexpr int weakened = 0;
#endif

// The barrier of one block. It needs no deadline: every wait for another rank has one, and no thread leaves alone.
class BlockBarrier {
public:
    explicit BlockBarrier(int threads) : sums(threads), threads_(threads) {}

    // The bits that any of its threads has set.
    uint32_t combine(uint32_t mine) {
        std::unique_lock lock(mutex_);
        bits_ |= mine;
        if (++arrived_ < threads_) {
            const uint64_t phase = phase_;
            all_.wait(lock, [&] { return phase_ != phase; });
        } else {
            result_ = bits_;
            bits_ = 0;
            arrived_ = 0;
            ++phase_;
            all_.notify_all();
        }
        return result_;
    }

    uint32_t words[32];        // of the block
    std::vector<double> sums;  // one of each thread

private:
    const int threads_;
    int arrived_ = 0;
    uint32_t bits_ = 0, result_ = 0;
    uint64_t phase_ = 0;
    std::mutex mutex_;
    std::condition_variable all_;
};

constexpr int WARP = 1;

struct Ctx {
    int thread, threads, block, blocks;
    BlockBarrier* barrier;
};

// Not 0: this pseudo-random sequence decides at each access to a flag whether the thread yields.
inline thread_local uint64_t yield_state = 0;

inline void maybe_yield() {
    if (!yield_state) return;
    yield_state ^= yield_state << 13, yield_state ^= yield_state >> 7, yield_state ^= yield_state << 17;  // xorshift64
    if (yield_state % 4 == 0) sched_yield();
    if (yield_state % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

inline uint32_t block_or(const Ctx& ctx, uint32_t mine) { return ctx.barrier->combine(mine); }
inline bool block_any(const Ctx& ctx, bool mine) { return block_or(ctx, mine); }
inline double block_sum(const Ctx& ctx, double mine) {
    std::vector<double>& sums = ctx.barrier->sums;
    sums[ctx.thread] = mine;
    block_or(ctx, 0);
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    block_or(ctx, 0);
    return sum;
}
inline float square_root(float x) { return std::sqrt(x); }
inline uint32_t* block_words(const Ctx& ctx) { return ctx.barrier->words; }

template <class Word>
Word load(const Word* at, int order) {
    maybe_yield();
    return __atomic_load_n(at, order);
}

template <class Word>
void store(Word* at, Word value, int order) {
    maybe_yield();
    __atomic_store_n(at, value, order);
}

inline uint64_t load_acquire(const uint64_t* at) { return load(at, __ATOMIC_ACQUIRE); }

template <DeviceSite site>
void store_release(uint64_t* at, uint64_t value) {
    store(at, value, site == weakened ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
}

inline uint64_t load_relaxed(const uint64_t* at) { return load(at, __ATOMIC_RELAXED); }
inline uint32_t load_relaxed(const uint32_t* at) { return load(at, __ATOMIC_RELAXED); }
inline void store_relaxed(uint64_t* at, uint64_t value) { store(at, value, __ATOMIC_RELAXED); }
inline void store_relaxed(uint32_t* at, uint32_t value) { store(at, value, __ATOMIC_RELAXED); }
inline void load_pair(const uint64_t* at, uint64_t& first, uint64_t& second) {
    second = load_relaxed(at + 1);
    first = load_relaxed(at);
}
inline void store_pair(uint64_t* at, uint64_t first, uint64_t second) {
    store_relaxed(at + 1, second);
    store_relaxed(at, first);
}
inline bool claim(uint32_t* word) { return !__atomic_exchange_n(word, 1u, __ATOMIC_RELAXED); }

inline bool last_of(uint32_t* word, uint32_t n) {
    const bool last = __atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL) == n - 1;
    if (last) store_relaxed(word, 0u);
    return last;
}

inline Pack load16(const byte* at) { return *reinterpret_cast<const Pack*>(at); }
inline void store16(byte* at, const Pack& pack) { *reinterpret_cast<Pack*>(at) = pack; }

// A float in a format of few bits; `largest`: what larger ones become.
inline uint32_t small_float(float x, int exponent, int mantissa, float largest) {
    const uint32_t sign = uint32_t(std::signbit(x)) << (exponent + mantissa);
    const uint32_t ones = (1u << (exponent + mantissa)) - 1, infinity = ones >> mantissa << mantissa;
    if (std::isnan(x)) return ones;
    const float magnitude = std::min(std::abs(x), largest);
    if (std::isinf(magnitude)) return sign | infinity;
    const int bias = (1 << (exponent - 1)) - 1;
    const int scale = std::max(magnitude ? std::ilogb(magnitude) : 1 - bias, 1 - bias) - mantissa;
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -scale)));  // to even
    const uint32_t bits = (static_cast<uint32_t>(scale + mantissa + bias - 1) << mantissa) + steps;
    return sign | (std::isinf(largest) ? std::min(bits, infinity) : bits);
}

inline float float_of(uint32_t bits, int exponent, int mantissa) {
    const uint32_t steps = bits & ((1u << mantissa) - 1), field = bits >> mantissa & ((1u << exponent) - 1);
    const int bias = (1 << (exponent - 1)) - 1, scale = static_cast<int>(std::max(field, 1u)) - bias - mantissa;
    const float magnitude = std::ldexp(static_cast<float>(field ? steps | 1u << mantissa : steps), scale);
    return bits >> (exponent + mantissa) & 1 ? -magnitude : magnitude;
}

inline uint32_t narrow_float16x2(float low, float high) {
    return small_float(low, 5, 10, INFINITY) | small_float(high, 5, 10, INFINITY) << 16;
}
inline uint32_t narrow_bfloat16x2(float low, float high) {
    return small_float(low, 8, 7, INFINITY) | small_float(high, 8, 7, INFINITY) << 16;
}
inline uint16_t narrow_e4m3x2(float low, float high) {
    return static_cast<uint16_t>(small_float(low, 4, 3, 448) | small_float(high, 4, 3, 448) << 8);
}
inline uint16_t narrow_e5m2x2(float low, float high) {
    return static_cast<uint16_t>(small_float(low, 5, 2, 57344) | small_float(high, 5, 2, 57344) << 8);
}

inline void widen_float16x2(uint32_t pair, float& low, float& high) {
    const auto widen = [](uint32_t x) {
        if ((x & 0x7c00) != 0x7c00) return float_of(x, 5, 10);
        return x & 0x3ff ? NAN : x & 0x8000 ? -INFINITY : INFINITY;
    };
    low = widen(pair & 0xffff);
    high = widen(pair >> 16);
}
inline uint32_t float16x2_of_e4m3x2(uint16_t pair) {
    const auto widen = [](uint32_t x) { return (x & 0x7f) == 0x7f ? NAN : float_of(x, 4, 3); };
    return narrow_float16x2(widen(pair & 0xff), widen(pair >> 8));
}

constexpr bool CONVERTS_FLOAT8 = true;

constexpr bool HAS_MULTIMEM = true;
inline uint64_t multimem_accesses = 0;  // for tests

template <class Math, class Copies>
Pack multimem_sum(const Math& math, const Copies& copies, uint64_t at) {
    __atomic_fetch_add(&multimem_accesses, 1, __ATOMIC_RELAXED);
    auto sum = math.input(load16(copies.of(0) + at));
    for (int p = 1; p < copies.count; ++p) math.combine(sum, math.input(load16(copies.of(p) + at)));
    return math.output(sum);
}

template <class Copies>
void multimem_store(const Copies& copies, uint64_t at, const Pack& pack) {
    __atomic_fetch_add(&multimem_accesses, 1, __ATOMIC_RELAXED);
    for (int p = 0; p < copies.count; ++p) store16(copies.of(p) + at, pack);
}

inline void multimem_fence() {}

inline uint64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Many threads share few cores: a thread that has waited long lets the others run.
inline void pause(uint32_t spins) {
    if (spins < 64) {
        sched_yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

}  // namespace ringcomm::cuda
