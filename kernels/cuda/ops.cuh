// The operations, as kernels/cpu/reduce.h has them: each input is taken as `input` leaves it, folded into the
// accumulator by `combine`, and the result is what `output` makes of the accumulator.
#pragma once

#include "types.cuh"

namespace ringcomm::cuda {

enum Op { SUM, PROD, MIN, MAX, AVG, BAND, BOR, BXOR, PREMUL_SUM, OPS };

RC_SHARED constexpr bool legal(Kind kind, int op) {
    switch (op) {
        case SUM:
        case PROD: return true;
        case MIN:
        case MAX: return kind != COMPLEX;
        case AVG:
        case PREMUL_SUM: return kind == REAL || kind == COMPLEX;
        default: return kind == TRUTH || kind == INTEGER;
    }
}

// Integers wrap, which only unsigned ones may do.
template <class T>
RC_DEVICE T add(T a, T b, Plain<T, INTEGER>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class T>
RC_DEVICE T multiply(T a, T b, Plain<T, INTEGER>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

template <class T, class Type>
RC_DEVICE T add(T a, T b, Type) {
    return a + b;
}

template <class T, class Type>
RC_DEVICE T multiply(T a, T b, Type) {
    return a * b;
}

RC_DEVICE float scale(float x, double factor) { return x * static_cast<float>(factor); }
RC_DEVICE double scale(double x, double factor) { return x * factor; }
RC_DEVICE float divide(float x, double divisor) { return x / static_cast<float>(divisor); }
RC_DEVICE double divide(double x, double divisor) { return x / divisor; }

template <class T>
RC_DEVICE Complex<T> scale(Complex<T> x, double factor) {
    return {scale(x.real, factor), scale(x.imaginary, factor)};
}

template <class T>
RC_DEVICE Complex<T> divide(Complex<T> x, double divisor) {
    return {divide(x.real, divisor), divide(x.imaginary, divisor)};
}

template <class Type, int op>
struct Operation {
    using Wide = typename Type::Wide;

    RC_DEVICE static Wide input(Wide x, double factor) {
        if constexpr (op == PREMUL_SUM) return scale(x, factor);
        return x;
    }

    RC_DEVICE static Wide combine(Wide a, Wide b) {
        constexpr bool truth = Type::kind == TRUTH;
        if constexpr (op == BXOR) {
            return a ^ b;
        } else if constexpr (op == BOR || (truth && (op == SUM || op == MAX))) {
            return a | b;
        } else if constexpr (op == BAND || truth) {
            return a & b;
        } else if constexpr (op == PROD) {
            return multiply(a, b, Type());
        } else if constexpr (op == MIN) {  // the first NaN wins, and of two equal values the later one
            return a != a ? a : (a < b ? a : b);
        } else if constexpr (op == MAX) {
            return a != a ? a : (a > b ? a : b);
        } else {
            return add(a, b, Type());
        }
    }

    RC_DEVICE static Wide output(Wide acc, double divisor) {
        if constexpr (op == AVG) return divide(acc, divisor);
        return acc;
    }
};

// One dtype and one operation, 16 bytes at a time.
template <class Type, int op>
struct Arithmetic {
    using Stored = typename Type::Stored;
    static constexpr uint64_t item = sizeof(Stored);
    static constexpr int lanes = PACK / item;
    struct Lanes {
        Stored lane[lanes];
    };
    struct Wide {
        typename Type::Wide lane[lanes];
    };
    // Packs in flight: enough to hide the latency of memory, and few enough for the registers.
    static constexpr int tile = lanes <= 8 ? 4 : 2;

    double factor, divisor;

    template <class Args>
    RC_DEVICE explicit Arithmetic(const Args& args)
        : factor(args.factor), divisor(args.arena.layout.shape.ranks * args.factor) {}

    RC_DEVICE Wide partial(const Pack& pack) const {
        const Lanes lanes_of = bits_as<Lanes>(pack);
        Wide wide;
        RC_UNROLL for (int i = 0; i < lanes; ++i) wide.lane[i] = Type::widen(lanes_of.lane[i]);
        return wide;
    }

    RC_DEVICE Wide input(const Pack& pack) const {
        Wide wide = partial(pack);
        RC_UNROLL for (int i = 0; i < lanes; ++i) wide.lane[i] = Operation<Type, op>::input(wide.lane[i], factor);
        return wide;
    }

    RC_DEVICE void combine(Wide& acc, const Wide& wide) const {
        RC_UNROLL for (int i = 0; i < lanes; ++i) acc.lane[i] = Operation<Type, op>::combine(acc.lane[i], wide.lane[i]);
    }

    RC_DEVICE Pack narrow(const Wide& wide) const {
        Lanes result;
        RC_UNROLL for (int i = 0; i < lanes; ++i) result.lane[i] = Type::narrow(wide.lane[i]);
        return bits_as<Pack>(result);
    }

    RC_DEVICE Pack output(Wide acc) const {
        RC_UNROLL for (int i = 0; i < lanes; ++i) acc.lane[i] = Operation<Type, op>::output(acc.lane[i], divisor);
        return narrow(acc);
    }
};

}  // namespace ringcomm::cuda
