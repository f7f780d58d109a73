// The operations on numbers: each folds the inputs of one dtype, 16 bytes at a time.
#pragma once

#include "types.cuh"

namespace ringcomm::cuda {

enum Op {
#define OP_ROW(name, NAME, ...) NAME,
#include "ringcomm/types.def"
    OPS
};

RC_DEVICE float scale(float x, double factor) { return x * static_cast<float>(factor); }
RC_DEVICE double scale(double x, double factor) { return x * factor; }
RC_DEVICE float divide(float x, double divisor) { return x / static_cast<float>(divisor); }
RC_DEVICE double divide(double x, double divisor) { return x / divisor; }

template <class T>
RC_DEVICE T divide(T x, double divisor);

template <class T>
RC_DEVICE Complex<T> scale(Complex<T> x, double factor) {
    return {scale(x.real, factor), scale(x.imaginary, factor)};
}

template <class T>
RC_DEVICE Complex<T> divide(Complex<T> x, double divisor) {
    return {divide(x.real, divisor), divide(x.imaginary, divisor)};
}

RC_DEVICE uint8_t truth(uint8_t x) { return x != 0; }

#define RC_OPERATION RC_DEVICE
#include "kernels/operations.inc"
#undef RC_OPERATION

// Truncates towards zero.
template <class T>
RC_DEVICE T divide(T x, double divisor) {
    if constexpr (static_cast<T>(-1) < static_cast<T>(0))
        return static_cast<T>(static_cast<int64_t>(x) / whole<int64_t>(divisor));
    else
        return static_cast<T>(static_cast<uint64_t>(x) / whole<uint64_t>(divisor));
}

template <Kind kind, int op>
struct Definition;
#define OP_ROW(name, NAME, definition, kinds) \
    template <Kind kind>                      \
    struct Definition<kind, NAME> {           \
        using type = definition;              \
    };                                        \
    template <>                               \
    struct Definition<TRUTH, NAME> {          \
        using type = definition::Truth;       \
    };
#include "ringcomm/types.def"

template <class Type>
constexpr MultimemSum multimem_sum_of = NO_MULTIMEM_SUM;
template <>
inline constexpr MultimemSum multimem_sum_of<Number<float, REAL>> = MULTIMEM_FLOAT32;
template <>
inline constexpr MultimemSum multimem_sum_of<Float16> = MULTIMEM_FLOAT16;
template <>
inline constexpr MultimemSum multimem_sum_of<Bfloat16> = MULTIMEM_BFLOAT16;

// One dtype and one operation.
template <class Type, int op>
struct Arithmetic {
    using Stored = typename Type::Stored;
    using Op = typename Definition<Type::kind, op>::type;
    static constexpr uint64_t item = sizeof(Stored);
    static constexpr int lanes = PACK / item;
    static constexpr bool paired = requires { typename Type::Pairs; };
    struct Wide {
        typename Type::Wide lane[lanes];
    };
    static constexpr MultimemSum switch_sum = multimem_sum_of<Type>;
    static constexpr bool multimem = HAS_MULTIMEM && op == SUM && switch_sum != NO_MULTIMEM_SUM;
    // Whether RMSNorm may follow in the same launch (rms_norm.cuh): a sum of 2 bytes or more that is made in float32.
    static constexpr bool normalizes = op == SUM && Type::kind == REAL && item > 1 &&
                                       sizeof(Wide) == lanes * sizeof(float);
    // Packs in flight: enough to hide the latency of memory, few enough for the registers.
    static constexpr int tile = lanes <= 8 ? 4 : 2;

    double factor, divisor;

    template <class Args>
    RC_DEVICE explicit Arithmetic(const Args& args)
        : factor(args.factor), divisor(args.arena.layout.shape.ranks * args.factor) {}

    RC_DEVICE Wide partial(const Pack& pack) const {
        if constexpr (paired) {
            const auto pairs = bits_as<typename Type::Pairs>(pack);
            Wide wide;
            RC_UNROLL for (int i = 0; i < lanes; i += 2) Type::widen(pairs.of[i / 2], wide.lane[i], wide.lane[i + 1]);
            return wide;
        } else {
            return bits_as<Wide>(pack);
        }
    }

    RC_DEVICE Wide input(const Pack& pack) const {
        Wide wide = partial(pack);
        RC_UNROLL for (int i = 0; i < lanes; ++i) wide.lane[i] = Op::input(wide.lane[i], factor);
        return wide;
    }

    RC_DEVICE void combine(Wide& acc, const Wide& wide) const {
        RC_UNROLL for (int i = 0; i < lanes; ++i) acc.lane[i] = combined(acc.lane[i], wide.lane[i]);
    }

    RC_DEVICE Pack narrow(const Wide& wide) const {
        if constexpr (paired) {
            typename Type::Pairs pairs;
            RC_UNROLL for (int i = 0; i < lanes; i += 2) pairs.of[i / 2] = Type::narrow(wide.lane[i], wide.lane[i + 1]);
            return bits_as<Pack>(pairs);
        } else {
            return bits_as<Pack>(wide);
        }
    }

    // Where it normalizes.
    RC_DEVICE double squares(const Pack& pack) const {
        const Wide wide = partial(pack);
        double sum = 0;
        RC_UNROLL for (int i = 0; i < lanes; ++i) sum += static_cast<double>(wide.lane[i]) * wide.lane[i];
        return sum;
    }
    // Rounded after each of the two products, as the separate operations are.
    RC_DEVICE Pack scaled(const Pack& pack, float scale, const Pack& weight) const {
        Wide wide = partial(pack);
        RC_UNROLL for (int i = 0; i < lanes; ++i) wide.lane[i] *= scale;
        wide = partial(narrow(wide));
        const Wide by = partial(weight);
        RC_UNROLL for (int i = 0; i < lanes; ++i) wide.lane[i] *= by.lane[i];
        return narrow(wide);
    }

    RC_DEVICE Pack output(Wide acc) const {
        RC_UNROLL for (int i = 0; i < lanes; ++i) acc.lane[i] = Op::output(acc.lane[i], divisor);
        return narrow(acc);
    }

private:
    RC_DEVICE static auto combined(auto a, auto b) {
        using T = decltype(a);
        // Integers wrap, which C++ defines for unsigned ones only.
        if constexpr (Type::kind == INTEGER && !Op::compares)
            return static_cast<T>(Op::combine(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
        else
            return static_cast<T>(Op::combine(a, b));
    }
};

}  // namespace ringcomm::cuda
