// Vectors of any number of lanes, by the compiler's vector extension. Part of level.inc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ringcomm::RC_LEVEL {
namespace {

template <class T, size_t Lanes>
struct VectorOf {
    typedef T type __attribute__((vector_size(Lanes * sizeof(T))));
};

template <class T, size_t Lanes>
using Vector = typename VectorOf<T, Lanes>::type;

template <class V>
using Lane = std::remove_cvref_t<decltype(V{}[0])>;

// memcpy is the portable unaligned access; it compiles to one instruction.
template <class V>
[[gnu::always_inline]] inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
[[gnu::always_inline]] inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

}  // namespace
}  // namespace ringcomm::RC_LEVEL
