// The 16-bit floats: accumulated in float32, rounded to nearest-even. Part of level.inc.
//
// The conversions are exact integer arithmetic, or the CPU's instruction for it: the same bits either way, and neither
// depends on whether the process flushes denormals to zero.
#pragma once

#include "dtypes.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(RC_NEON)
#include <arm_neon.h>
#endif

namespace ringcomm::RC_LEVEL {
namespace {

// Two neighbors are one lane of 32 bits: even and odd elements become a vector
// each, and no lane is moved. `Format` converts to and from 16 bits in the low half of a lane.
template <class Format>
struct Half {
    using Stored = uint16_t;
    static constexpr size_t lanes = RC_VECTOR_BYTES / sizeof(Stored);

    template <size_t Lanes>
    static auto widen(Vector<uint16_t, Lanes> v) {
        if constexpr (Lanes == 1) {
            return Parts<float, 1, 1>{Format::template decode<1>(Vector<uint32_t, 1>{v[0]})};
        } else {
            const auto pairs = reinterpret_cast<Vector<uint32_t, Lanes / 2>>(v);
            return Parts<float, Lanes / 2, 2>{Format::template decode<Lanes / 2>(pairs & 0xffff),
                                              Format::template decode<Lanes / 2>(pairs >> 16)};
        }
    }

    template <size_t Lanes>
    static Vector<uint16_t, Lanes> narrow(auto wide) {
        if constexpr (Lanes == 1) {
            return Vector<uint16_t, 1>{static_cast<uint16_t>(Format::template encode<1>(wide.part[0])[0])};
        } else {
            const auto even = Format::template encode<Lanes / 2>(wide.part[0]);
            const auto odd = Format::template encode<Lanes / 2>(wide.part[1]);
            return reinterpret_cast<Vector<uint16_t, Lanes>>(even | odd << 16);
        }
    }
};

// bfloat16 is the upper half of a float32.
struct Bfloat16Format {
    template <size_t Lanes>
    static Vector<float, Lanes> decode(Vector<uint32_t, Lanes> half) {
        return reinterpret_cast<Vector<float, Lanes>>(half << 16);
    }

    template <size_t Lanes>
    static Vector<uint32_t, Lanes> encode(Vector<float, Lanes> v) {
        const auto bits = reinterpret_cast<Vector<uint32_t, Lanes>>(v);
        const auto rounded = bits + 0x7fff + (bits >> 16 & 1);
        const auto quiet_nan = bits | 1 << 22;
        return (v == v ? rounded : quiet_nan) >> 16;
    }
};

// float16 has its mantissa 13 bits further right than float32, and an exponent bias of 15 instead of 127.
struct Float16Format {
    // As int32: every magnitude fits, and signed comparisons are what SSE2 has.
    template <size_t Lanes>
    using Bits = Vector<int32_t, Lanes>;

    static constexpr int32_t rebias = (127 - 15) << 23;

    template <size_t Lanes>
    static Vector<float, Lanes> decode(Vector<uint32_t, Lanes> half) {
        using Float = Vector<float, Lanes>;
        const auto sign = (half & 0x8000) << 16;
        const auto magnitude = reinterpret_cast<Bits<Lanes>>(half & 0x7fff) << 13;
        const auto normal = magnitude + rebias;
        // Inf and NaN: the exponent goes from all ones to all ones.
        const auto special = normal + rebias;
        // 2^-14 × 1.m, less 2^-14, is the denormal 2^-14 × 0.m.
        const auto one = Bits<Lanes>{} + rebias + (1 << 23);
        const auto denormal =
            reinterpret_cast<Bits<Lanes>>(reinterpret_cast<Float>(magnitude + one) - reinterpret_cast<Float>(one));
        const auto finite = magnitude < 0x0400 << 13 ? denormal : normal;
        const auto result = magnitude < 0x7c00 << 13 ? finite : special;
        return reinterpret_cast<Float>(sign | reinterpret_cast<Vector<uint32_t, Lanes>>(result));
    }

    template <size_t Lanes>
    static Vector<uint32_t, Lanes> encode(Vector<float, Lanes> v) {
        using Float = Vector<float, Lanes>;
        const auto bits = reinterpret_cast<Bits<Lanes>>(v);
        const auto magnitude = bits & 0x7fffffff;
        const auto sign = (bits ^ magnitude) >> 16 & 0x8000;
        // Unsigned, because NaN lanes overflow; their result is discarded.
        const auto whole = reinterpret_cast<Vector<uint32_t, Lanes>>(magnitude);
        const auto normal = reinterpret_cast<Bits<Lanes>>(whole - rebias + 0x0fff + (whole >> 13 & 1)) >> 13;
        // The last place of 0.5 is 2^-24, that of a float16 denormal: the addition does the rounding.
        const auto half = Float{} + 0.5f;
        const auto denormal = reinterpret_cast<Bits<Lanes>>(reinterpret_cast<Float>(magnitude) + half) -
                              reinterpret_cast<Bits<Lanes>>(half);
        const auto finite = magnitude < (127 - 14) << 23 ? denormal : normal;
        const auto special = magnitude > 0x7f800000 ? Bits<Lanes>{} + 0x7e00 : Bits<Lanes>{} + 0x7c00;
        // Values of 2^16 and above become infinity; 65520 to 2^16 round up to it.
        const auto result = magnitude < (127 + 16) << 23 ? finite : special;
        return reinterpret_cast<Vector<uint32_t, Lanes>>(sign | result);
    }
};

using Bfloat16 = Half<Bfloat16Format>;

#if defined(__F16C__) || defined(RC_NEON)
// Whole vectors by the CPU's instructions, the rest as above.
struct Float16 : Half<Float16Format> {
    static constexpr size_t lanes = RC_VECTOR_BYTES / sizeof(float);

    template <size_t Lanes>
    static auto widen(Vector<uint16_t, Lanes> v) {
        if constexpr (Lanes == lanes)
            return Parts<float, Lanes, 1>{from_half(v)};
        else
            return Half::widen<Lanes>(v);
    }

    template <size_t Lanes>
    static Vector<uint16_t, Lanes> narrow(auto wide) {
        if constexpr (Lanes == lanes)
            return reinterpret_cast<Vector<uint16_t, Lanes>>(to_half(wide.part[0]));
        else
            return Half::narrow<Lanes>(wide);
    }

private:
#ifdef __F16C__
    static constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
#endif
#if defined(__AVX512F__)
    // Masked, with every lane taken: GCC 12 warns of uninitialized lanes in its own definition of the plain forms.
    static __m512 from_half(auto v) { return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(v)); }
    static __m256i to_half(__m512 v) { return _mm512_maskz_cvtps_ph(0xffff, v, nearest); }
#elif defined(__F16C__)
    static __m256 from_half(auto v) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(v)); }
    static __m128i to_half(__m256 v) { return _mm256_cvtps_ph(v, nearest); }
#else
    static auto from_half(auto v) {
        return reinterpret_cast<Vector<float, lanes>>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(v)));
    }
    static float16x4_t to_half(auto v) { return vcvt_f16_f32(reinterpret_cast<float32x4_t>(v)); }
#endif
};
#else
using Float16 = Half<Float16Format>;
#endif

}  // namespace
}  // namespace ringcomm::RC_LEVEL
