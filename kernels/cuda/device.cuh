// port.cuh on a GPU. Flags have system scope: peers are other GPUs and the host.
#pragma once

#define RC_DEVICE __device__ __forceinline__
#define RC_NOINLINE __device__ __noinline__
#define RC_HOST_DEVICE __host__ __device__ __forceinline__
#define RC_NO_UNROLL _Pragma("unroll 1")
#define RC_UNROLL _Pragma("unroll")

namespace ringcomm::cuda {

constexpr int WARP = 32;

struct Ctx {
    int thread, threads, block, blocks;
};

RC_DEVICE bool block_any(const Ctx&, bool mine) { return __syncthreads_or(mine); }

RC_DEVICE uint32_t block_or(const Ctx& ctx, uint32_t mine) {
    __shared__ uint32_t all;
    if (ctx.thread == 0) all = 0;
    __syncthreads();
    if (mine) atomicOr(&all, mine);
    __syncthreads();
    const uint32_t result = all;
    __syncthreads();
    return result;
}

RC_DEVICE double block_sum(const Ctx& ctx, double mine) {
    __shared__ double sums[WARP];
    for (int d = WARP / 2; d; d /= 2) mine += __shfl_xor_sync(0xffffffff, mine, d);
    if (ctx.thread % WARP == 0) sums[ctx.thread / WARP] = mine;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < ctx.threads / WARP; ++w) sum += sums[w];
    __syncthreads();
    return sum;
}

RC_DEVICE float square_root(float x) { return __fsqrt_rn(x); }

RC_DEVICE uint32_t* block_words(const Ctx&) {
    __shared__ uint32_t words[32];
    return words;
}

RC_DEVICE uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

template <DeviceSite>
RC_DEVICE void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

RC_DEVICE uint64_t load_relaxed(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE uint32_t load_relaxed(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

RC_DEVICE void store_relaxed(uint64_t* at, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

RC_DEVICE void store_relaxed(uint32_t* at, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

RC_DEVICE void load_pair(const uint64_t* at, uint64_t& first, uint64_t& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(at) : "memory");
}

RC_DEVICE void store_pair(uint64_t* at, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}

RC_DEVICE bool claim(uint32_t* word) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return !before;
}

RC_DEVICE bool last_of(uint32_t* word, uint32_t n) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(n - 1) : "memory");
    return before == n - 1;
}

RC_DEVICE Pack load16(const byte* at) {
    Pack p;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at)
                 : "memory");
    return p;
}

RC_DEVICE void store16(byte* at, const Pack& p) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]),
                 "r"(p.word[3])
                 : "memory");
}

RC_DEVICE void widen_float16x2(uint32_t pair, float& low, float& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}

RC_DEVICE uint32_t narrow_float16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

RC_DEVICE uint32_t narrow_bfloat16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#if __CUDA_ARCH__ >= 890
constexpr bool CONVERTS_FLOAT8 = true;
#else
constexpr bool CONVERTS_FLOAT8 = false;
#endif

RC_DEVICE uint32_t float16x2_of_e4m3x2(uint16_t from) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(from));
    return pair;
}

RC_DEVICE uint16_t narrow_e4m3x2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

RC_DEVICE uint16_t narrow_e5m2x2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

#if __CUDA_ARCH__ >= 900
constexpr bool HAS_MULTIMEM = true;
#else
constexpr bool HAS_MULTIMEM = false;
#endif

template <class Math, class Copies>
RC_DEVICE Pack multimem_sum(const Math&, const Copies& copies, uint64_t at) {
    Pack sum;
#define RC_MULTIMEM_SUM(type)                                                                 \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0, %1, %2, %3}, [%4];"  \
                 : "=r"(sum.word[0]), "=r"(sum.word[1]), "=r"(sum.word[2]), "=r"(sum.word[3]) \
                 : "l"(copies.all() + at)                                                     \
                 : "memory")
    if constexpr (Math::switch_sum == MULTIMEM_FLOAT32)
        RC_MULTIMEM_SUM(".v4.f32");
    else if constexpr (Math::switch_sum == MULTIMEM_BFLOAT16)
        RC_MULTIMEM_SUM(".acc::f32.v4.bf16x2");
    else
        RC_MULTIMEM_SUM(".acc::f32.v4.f16x2");
#undef RC_MULTIMEM_SUM
    return sum;
}

template <class Copies>
RC_DEVICE void multimem_store(const Copies& copies, uint64_t at, const Pack& pack) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(copies.all() + at),
                 "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
}

RC_DEVICE void multimem_fence() { asm volatile("fence.proxy.alias;" ::: "memory"); }

RC_DEVICE uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

RC_DEVICE void pause(uint32_t) { asm volatile("nanosleep.u32 20;"); }

}  // namespace ringcomm::cuda
