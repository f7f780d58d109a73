// The stored and accumulated forms of a dtype: `widen` follows a load, `narrow` precedes a store. Part of level.inc.
#pragma once

#include "vector.h"

namespace ringcomm::RC_LEVEL {
namespace {

// The accumulators for one vector of stored elements.
template <class T, size_t Lanes, size_t Count>
struct Parts {
    static constexpr size_t count = Count;
    Vector<T, Lanes> part[Count];
};

template <class T>
struct PlainVector {
    using Stored = T;
    static constexpr size_t lanes = RC_VECTOR_BYTES / sizeof(Stored);

    template <size_t Lanes>
    static Parts<T, Lanes, 1> widen(Vector<T, Lanes> v) {
        return {v};
    }

    template <size_t Lanes>
    static Vector<T, Lanes> narrow(Parts<T, Lanes, 1> wide) {
        return wide.part[0];
    }
};

}  // namespace
}  // namespace ringcomm::RC_LEVEL
