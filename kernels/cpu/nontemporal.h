// Non-temporal copies, for blocks that another core will read. Part of level.inc.
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

}  // namespace

// Whole cache lines use non-temporal stores, the bytes before the first and after the last ordinary ones.
[[gnu::noinline]] void copy_nontemporal(void* dst, const void* src, size_t bytes) {
    constexpr size_t line = 64;
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    const size_t before = -reinterpret_cast<uintptr_t>(to) % line;
    size_t i = before < bytes ? before : bytes;
    std::memcpy(to, from, i);
    for (; bytes - i >= line; i += line)
        for (size_t j = 0; j < line; j += sizeof(Block)) store_nontemporal(to + i + j, load<Block>(from + i + j));
    std::memcpy(to + i, from + i, bytes - i);
    // A release store does not order non-temporal stores: publishing this block by a flag relies on this fence.
    _mm_sfence();
}
#else
void copy_nontemporal(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }
#endif

}  // namespace ringcomm::RC_LEVEL
