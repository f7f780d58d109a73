// The dtypes: how an element is stored and what it is accumulated in. The small floats are accumulated in float32 and
// rounded to nearest-even.
#pragma once

#include "kernels/kinds.h"
#include "port.cuh"

namespace ringcomm::cuda {

// The codes of ringcomm.h, which NVRTC does not see.
enum Dtype {
#define DTYPE_ROW(name, NAME, ...) NAME,
#include "ringcomm/types.def"
    DTYPES
};

template <class T, Kind K>
struct Number {
    using Stored = T;
    using Wide = T;
    static constexpr Kind kind = K;
};

template <class T>
struct alignas(2 * sizeof(T)) Complex {
    T real, imaginary;
};

template <class T>
RC_DEVICE Complex<T> operator+(Complex<T> a, Complex<T> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
}

template <class T>
RC_DEVICE Complex<T> operator*(Complex<T> a, Complex<T> b) {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

// The small floats are converted in pairs, of two adjacent elements: GPUs do so in one instruction.
template <class Bits, class Two>
struct SmallFloat {
    using Stored = Bits;
    using Pair = Two;
    struct Pairs {
        Pair of[PACK / sizeof(Pair)];
    };
    using Wide = float;
    static constexpr Kind kind = REAL;
};

// float16, and bfloat16, the upper half of a float32.
template <int Exponent, int Mantissa>
struct SixteenBits : SmallFloat<uint16_t, uint32_t> {
    static constexpr bool is_upper_half = Exponent == 8;

    RC_DEVICE static void widen(uint32_t pair, float& low, float& high) {
        if constexpr (is_upper_half) {
            low = bits_as<float>(pair << 16);
            high = bits_as<float>(pair & 0xffff0000);
        } else {
            widen_float16x2(pair, low, high);
        }
    }
    RC_DEVICE static uint32_t narrow(float low, float high) {
        return is_upper_half ? narrow_bfloat16x2(low, high) : narrow_float16x2(low, high);
    }
};

using Float16 = SixteenBits<5, 10>;
using Bfloat16 = SixteenBits<8, 7>;

// A float of 8 bits. Finite: it has no infinities, and only the bits all ones are NaN (e4m3fn), which is what too large
// a number becomes.
template <int Exponent, int Mantissa, bool Finite>
struct Float8 : SmallFloat<uint8_t, uint16_t> {
    static constexpr int shift = 23 - Mantissa, bias = (1 << (Exponent - 1)) - 1;
    static constexpr uint32_t rebias = (127 - bias) << 23;
    static constexpr uint32_t ones = 0x7f;
    static constexpr uint32_t infinity = Finite ? ones : ones >> Mantissa << Mantissa;  // or NaN, where there is none
    // The least float that is rounded to that.
    static constexpr float overflow = Finite ? 464.00003f : 61440.f;

    RC_DEVICE static void widen(uint16_t pair, float& low, float& high) {
        if constexpr (!Finite) {  // the upper half of a float16
            widen_float16x2((pair & 0xffu) << 8 | (pair & 0xff00u) << 16, low, high);
        } else if constexpr (CONVERTS_FLOAT8) {
            widen_float16x2(float16x2_of_e4m3x2(pair), low, high);
        } else {
            widen_shifted(pair, low, high);
        }
    }

    RC_DEVICE static uint16_t narrow(float low, float high) {
        if constexpr (CONVERTS_FLOAT8) {
            // What is too large becomes the largest number, which lies just below.
            const uint32_t pair = Finite ? narrow_e4m3x2(low, high) : narrow_e5m2x2(low, high);
            return static_cast<uint16_t>(pair + too_large(low) + (too_large(high) << 8));
        } else {
            return static_cast<uint16_t>(narrow(low) | narrow(high) << 8);
        }
    }

    // ---- For GPUs before sm_89. Without branches: behind one the next access to memory would wait until the
    // arithmetic is done.

    // e4m3fn as a float16 whose exponent is too small by 8.
    RC_DEVICE static void widen_shifted(uint16_t pair, float& low, float& high) {
        const uint32_t apart = (pair & 0xffu) | (pair & 0xff00u) << 8;
        widen_float16x2((apart & 0x7f007f) << 7 | (apart & 0x800080) << 8, low, high);
        low = with_nan(256 * low);
        high = with_nan(256 * high);
    }

    RC_DEVICE static uint32_t narrow(float x) {
        const uint32_t wide = bits_as<uint32_t>(x), magnitude = wide & 0x7fffffff;
        const uint32_t odd = magnitude >> shift & 1;
        uint32_t small = (magnitude - rebias + (1u << (shift - 1)) - 1 + odd) >> shift;
        small = small > infinity ? infinity : small;
        // Beside a number whose last place is that of the denormals, the addition rounds as it should.
        constexpr uint32_t anchor = rebias + (1 << 23) + (shift << 23);
        const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(anchor)) - anchor;
        small = magnitude < rebias + (1 << 23) ? denormal : small;
        small = magnitude > 0x7f800000 ? infinity | 1u << (Mantissa - 1) : small;
        return small | wide >> 31 << 7;
    }

private:
    RC_DEVICE static float with_nan(float x) { return x == 480 || x == -480 ? bits_as<float>(0x7fffffffu) : x; }
    RC_DEVICE static uint32_t too_large(float x) { return x >= overflow || x <= -overflow; }  // no NaN is
};

using Float8E4m3fn = Float8<4, 3, true>;
using Float8E5m2 = Float8<5, 2, false>;

// The type of an element in types.def.
template <Kind K, class T>
struct Element {
    using type = Number<T, K>;
};

template <class T>
struct Element<COMPLEX, T> {
    using type = Number<Complex<T>, COMPLEX>;
};

template <class T>
    requires requires { typename T::Pair; }
struct Element<REAL, T> {
    using type = T;
};

template <int dtype>
struct TypeOf;
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) \
    template <>                                              \
    struct TypeOf<NAME> : Element<kind, element> {};
#include "ringcomm/types.def"

}  // namespace ringcomm::cuda
