// The dtypes: how an element is stored and what it is accumulated in. The small floats are accumulated in float32 and
// rounded to nearest-even; the conversions are integer arithmetic, so every compiler gives the same bits.
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

using Float16 = SmallFloat<uint16_t, 5, 10>;
using Bfloat16 = SmallFloat<uint16_t, 8, 7>;
using Float8E4m3fn = SmallFloat<uint8_t, 4, 3, true>;
using Float8E5m2 = SmallFloat<uint8_t, 5, 2>;

// The type of an element in types.def.
template <Kind K, class T>
struct Element {
    using type = Number<T, K>;
};

template <class T>
struct Element<COMPLEX, T> {
    using type = Number<Complex<T>, COMPLEX>;
};

template <class Bits, int Exponent, int Mantissa, bool Finite>
struct Element<REAL, SmallFloat<Bits, Exponent, Mantissa, Finite>> {
    using type = SmallFloat<Bits, Exponent, Mantissa, Finite>;
};

template <int dtype>
struct TypeOf;
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) \
    template <>                                              \
    struct TypeOf<NAME> : Element<kind, element> {};
#include "ringcomm/types.def"

}  // namespace ringcomm::cuda
