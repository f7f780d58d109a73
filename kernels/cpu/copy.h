// Copies, by ordinary and by non-temporal stores. Part of level.inc.
//
// memcpy of glibc 2.36 copies 2 KiB to 1 MiB by `rep movsb` on AMD, at 3 GB/s in place of 50 to 100 where the target
// lies 1 to 15 bytes beyond the source by their places in a page (Zen 4): every store seems to overlap the next load.
// Vectors are as fast as memcpy wherever that is fast.
#pragma once

#include <cstring>

#include "levels.h"
#include "vector.h"

#if RC_X86
#include <immintrin.h>
#endif

namespace ringcomm::RC_LEVEL {
#if RC_X86
namespace {

#if defined(__AVX512F__)
using Block = __m512i;
inline void store_nontemporal(void* to, Block v) { _mm512_stream_si512(static_cast<Block*>(to), v); }
#elif defined(__AVX2__)
using Block = __m256i;
inline void store_nontemporal(void* to, Block v) { _mm256_stream_si256(static_cast<Block*>(to), v); }
#else
using Block = __m128i;
inline void store_nontemporal(void* to, Block v) { _mm_stream_si128(static_cast<Block*>(to), v); }
#endif

// Stores whole cache lines of the target by store_block(to, block), the bytes before the first and after the last
// otherwise.
template <class StoreBlock>
[[gnu::always_inline]] inline void copy_lines(void* dst, const void* src, size_t bytes, StoreBlock store_block) {
    constexpr size_t line = 64;
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    const size_t before = -reinterpret_cast<uintptr_t>(to) % line;
    size_t i = before < bytes ? before : bytes;
    std::memcpy(to, from, i);
    for (; bytes - i >= line; i += line)
        for (size_t j = 0; j < line; j += sizeof(Block)) store_block(to + i + j, load<Block>(from + i + j));
    std::memcpy(to + i, from + i, bytes - i);
}

}  // namespace

[[gnu::noinline]] void copy(void* dst, const void* src, size_t bytes) {
    copy_lines(dst, src, bytes, [](void* to, Block v) {
        store(to, v);
        asm volatile("" ::: "memory");  // or the compiler would replace the loop with a call of memcpy
    });
}

[[gnu::noinline]] void copy_nontemporal(void* dst, const void* src, size_t bytes) {
    copy_lines(dst, src, bytes, store_nontemporal);
    // A release store does not order non-temporal stores: publishing this block by a flag relies on this fence.
    _mm_sfence();
}
#else
void copy(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }
void copy_nontemporal(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }
#endif

}  // namespace ringcomm::RC_LEVEL
