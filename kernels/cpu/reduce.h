// The operations, and the loop over the elements. Part of level.inc.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "dtypes.h"
#include "float16.h"

namespace ringcomm::RC_LEVEL {
namespace {

template <class V>
auto scale(V x, double factor) {
    return x * Lane<V>(factor);
}

template <class V>
auto divide(V x, double divisor) {
    return x / Lane<V>(divisor);
}

template <class V>
V truth(V x) {
    return V(x != 0) & 1;
}

#define RC_OPERATION
#include "kernels/operations.inc"
#undef RC_OPERATION

// Sums wrap as unsigned integers; the quotient is that of the numbers they stand for, truncated.
template <class Element>
struct IntegerAvg : Sum {
    template <class V>
    static V output(V acc, double divisor) {
        using Wide = std::conditional_t<std::is_signed_v<Element>, int64_t, uint64_t>;
        const Wide by = whole<Wide>(divisor);
        Element lanes[sizeof(V) / sizeof(Element)];  // in memory: clang takes 8 times as long to index a vector
        store(lanes, acc);
        for (Element& lane : lanes) lane = Element(Wide(lane) / by);
        return load<V>(lanes);
    }
};

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i on lanes that alternate real and imaginary parts.
struct ComplexProd : Operation {
    static constexpr int unit = 2;

    template <class V>
    static V combine(V x, V y) {
        return multiply(x, y, std::make_index_sequence<sizeof(V) / sizeof(Lane<V>)>());
    }

private:
    template <class V, size_t... I>
    static V multiply(V x, V y, std::index_sequence<I...>) {
        const V swapped{x[I ^ 1]...}, real{y[I & ~1]...}, imaginary{(I % 2 ? y[I] : -y[I | 1])...};
        return x * real + swapped * imaginary;
    }
};

// One pass over the elements. Each tile of a few vectors is read from all sources before the result is written, so it
// needs no temporary buffer, and dst may be one of the sources.
template <class Type, class Op>
struct Reduction {
    using Stored = typename Type::Stored;

    char* dst;
    const void* const* srcs;
    int n;
    double factor;

    [[gnu::always_inline]] void run(size_t count) const {
        constexpr size_t tile = 4;  // vectors in flight: enough to hide the latency of an addition
        size_t i = 0;
        for (; count - i >= tile * Type::lanes; i += tile * Type::lanes) step<Type::lanes, tile>(i);
        for (; count - i >= Type::lanes; i += Type::lanes) step<Type::lanes, 1>(i);
        rest<Type::lanes / 2>(i, count);
    }

    // The last part of a vector: a half, a quarter … down to one element.
    template <size_t Lanes>
    [[gnu::always_inline]] void rest(size_t i, size_t count) const {
        if constexpr (Lanes >= Op::unit) {
            if (count - i >= Lanes) {
                step<Lanes, 1>(i);
                i += Lanes;
            }
            rest<Lanes / 2>(i, count);
        }
    }

    template <size_t Lanes, size_t Vectors>
    [[gnu::always_inline]] void step(size_t i) const {
        decltype(input<Lanes>(0, i)) acc[Vectors];
        for (size_t v = 0; v < Vectors; ++v) acc[v] = input<Lanes>(0, i + v * Lanes);
        for (int s = 1; s < n; ++s)
            for (size_t v = 0; v < Vectors; ++v) combine(acc[v], input<Lanes>(s, i + v * Lanes));
        for (size_t v = 0; v < Vectors; ++v) output<Lanes>(acc[v], i + v * Lanes);
    }

    template <size_t Lanes>
    [[gnu::always_inline]] auto input(int source, size_t i) const {
        const char* from = static_cast<const char*>(srcs[source]) + i * sizeof(Stored);
        auto wide = Type::template widen<Lanes>(load<Vector<Stored, Lanes>>(from));
        for (auto& part : wide.part) part = Op::input(part, factor);
        return wide;
    }

    template <class Wide>
    [[gnu::always_inline]] static void combine(Wide& acc, const Wide& wide) {
        for (size_t p = 0; p < Wide::count; ++p) acc.part[p] = Op::combine(acc.part[p], wide.part[p]);
    }

    template <size_t Lanes, class Wide>
    [[gnu::always_inline]] void output(Wide acc, size_t i) const {
        for (auto& part : acc.part) part = Op::output(part, n * factor);
        store(dst + i * sizeof(Stored), Type::template narrow<Lanes>(acc));
    }
};

template <class Type, class Op>
void reduce(void* dst, const void* const* srcs, int n, size_t count, double factor) {
    Reduction<Type, Op>{static_cast<char*>(dst), srcs, n, factor}.run(count);
}

// Reduces complex numbers as twice as many floats: real and imaginary parts.
template <class Type, class Op>
void reduce_parts(void* dst, const void* const* srcs, int n, size_t count, double factor) {
    reduce<Type, Op>(dst, srcs, n, 2 * count, factor);
}

}  // namespace
}  // namespace ringcomm::RC_LEVEL
