// The small floats by the definition of their formats, for tests. Finite: no infinities, NaN is all ones (e4m3fn).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

template <class Bits, int Exponent, int Mantissa, bool Finite = false>
struct Format {
    static constexpr int bias = (1 << (Exponent - 1)) - 1, top = (1 << Exponent) - 1, one = 1 << Mantissa;
    static constexpr int nan = Finite ? (top << Mantissa) + one - 1 : (top << Mantissa) + one / 2;
    static constexpr int overflow = Finite ? nan : top << Mantissa;

    static float decode(Bits bits) {
        const int exponent = bits >> Mantissa & top, mantissa = bits & (one - 1);
        double value = std::ldexp(one + mantissa, exponent - bias - Mantissa);
        if (exponent == 0) value = std::ldexp(mantissa, 1 - bias - Mantissa);
        if (exponent == top && !Finite) value = mantissa ? NAN : INFINITY;
        if (Finite && (bits & nan) == nan) value = NAN;
        return static_cast<float>(bits >> (Exponent + Mantissa) ? -value : value);
    }

    static Bits encode(float value) {
        const int sign = std::signbit(value) << (Exponent + Mantissa);
        if (std::isnan(value)) return static_cast<Bits>(sign | nan);
        if (std::isinf(value)) return static_cast<Bits>(sign | overflow);
        const int exponent = value == 0 ? 1 - bias : std::max(std::ilogb(value), 1 - bias);
        // In units of the last place, rounded to nearest-even; a carry moves into the exponent by itself.
        const double units = std::nearbyint(std::ldexp(std::fabs(double{value}), Mantissa - exponent));
        const double bits = std::ldexp(exponent + bias - 1, Mantissa) + units;
        return static_cast<Bits>(sign | static_cast<int>(std::min<double>(bits, overflow)));
    }
};

using Half = Format<uint16_t, 5, 10>;
using Brain = Format<uint16_t, 8, 7>;
using E4m3 = Format<uint8_t, 4, 3, true>;
using E5m2 = Format<uint8_t, 5, 2>;
