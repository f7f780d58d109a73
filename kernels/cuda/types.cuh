// The dtypes: how an element is stored and what it is accumulated in. The small floats are accumulated in float32 and
// rounded to nearest-even; the conversions are integer arithmetic, so every compiler gives the same bits.
#pragma once

#include "port.cuh"

namespace ringcomm::cuda {

// As in ringcomm.h, which NVRTC does not see.
// clang-format off
enum Dtype {
    BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64,
    FLOAT16, BFLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128, FLOAT8_E4M3, FLOAT8_E5M2,
    DTYPES
};
// clang-format on

enum Kind { TRUTH, INTEGER, REAL, COMPLEX };

template <class T, Kind K>
struct Plain {
    using Stored = T;
    using Wide = T;
    static constexpr Kind kind = K;
    RC_DEVICE static T widen(T x) { return x; }
    RC_DEVICE static T narrow(T x) { return x; }
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

// A float of 1 + Exponent + Mantissa bits. Finite: it has no infinities, and only the bits all ones are NaN (e4m3fn),
// which is what too large a number becomes.
template <class Bits, int Exponent, int Mantissa, bool Finite = false>
struct SmallFloat {
    using Stored = Bits;
    using Wide = float;
    static constexpr Kind kind = REAL;
    static constexpr int shift = 23 - Mantissa, bias = (1 << (Exponent - 1)) - 1;
    static constexpr uint32_t rebias = (127 - bias) << 23;
    static constexpr uint32_t sign = 1u << (Exponent + Mantissa), ones = sign - 1;
    static constexpr uint32_t infinity = Finite ? ones : ones >> Mantissa << Mantissa;  // or NaN, where there is none

    // Without branches: behind one the next access to memory would wait until the arithmetic is done.
    RC_DEVICE static float widen(Bits x) {
        const uint32_t magnitude = x & ones, fraction = magnitude << shift;
        uint32_t wide = fraction + rebias;
        if constexpr (rebias) {
            // Of a denormal 0.m: 1.m - 1, times the smallest normal number.
            constexpr uint32_t one = rebias + (1 << 23);
            const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(one + fraction) - bits_as<float>(one));
            wide = magnitude < 1u << Mantissa ? denormal : wide;
            const bool special = Finite ? magnitude == ones : magnitude >= infinity;
            wide = special ? 0x7f800000 | (fraction & 0x7fffff) : wide;
        }
        return bits_as<float>(wide | (x & sign) << (31 - Exponent - Mantissa));
    }

    RC_DEVICE static Bits narrow(float x) {
        const uint32_t wide = bits_as<uint32_t>(x), magnitude = wide & 0x7fffffff;
        const uint32_t odd = magnitude >> shift & 1;
        uint32_t small = (magnitude - rebias + (1u << (shift - 1)) - 1 + odd) >> shift;
        small = small > infinity ? infinity : small;
        if constexpr (rebias) {
            // Beside a number whose last place is that of the denormals, the addition rounds as it should.
            constexpr uint32_t anchor = rebias + (1 << 23) + (shift << 23);
            const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(anchor)) - anchor;
            small = magnitude < rebias + (1 << 23) ? denormal : small;
        }
        small = magnitude > 0x7f800000 ? infinity | 1u << (Mantissa - 1) : small;
        return static_cast<Bits>(small | wide >> 31 << (Exponent + Mantissa));
    }
};

// clang-format off: a row a line
template <int dtype> struct TypeOf;
template <> struct TypeOf<BOOL>        { using type = Plain<uint8_t, TRUTH>; };
template <> struct TypeOf<INT8>        { using type = Plain<int8_t, INTEGER>; };
template <> struct TypeOf<UINT8>       { using type = Plain<uint8_t, INTEGER>; };
template <> struct TypeOf<INT16>       { using type = Plain<int16_t, INTEGER>; };
template <> struct TypeOf<UINT16>      { using type = Plain<uint16_t, INTEGER>; };
template <> struct TypeOf<INT32>       { using type = Plain<int32_t, INTEGER>; };
template <> struct TypeOf<UINT32>      { using type = Plain<uint32_t, INTEGER>; };
template <> struct TypeOf<INT64>       { using type = Plain<int64_t, INTEGER>; };
template <> struct TypeOf<UINT64>      { using type = Plain<uint64_t, INTEGER>; };
template <> struct TypeOf<FLOAT16>     { using type = SmallFloat<uint16_t, 5, 10>; };
template <> struct TypeOf<BFLOAT16>    { using type = SmallFloat<uint16_t, 8, 7>; };
template <> struct TypeOf<FLOAT32>     { using type = Plain<float, REAL>; };
template <> struct TypeOf<FLOAT64>     { using type = Plain<double, REAL>; };
template <> struct TypeOf<COMPLEX64>   { using type = Plain<Complex<float>, COMPLEX>; };
template <> struct TypeOf<COMPLEX128>  { using type = Plain<Complex<double>, COMPLEX>; };
template <> struct TypeOf<FLOAT8_E4M3> { using type = SmallFloat<uint8_t, 4, 3, true>; };
template <> struct TypeOf<FLOAT8_E5M2> { using type = SmallFloat<uint8_t, 5, 2>; };
// clang-format on

}  // namespace ringcomm::cuda
