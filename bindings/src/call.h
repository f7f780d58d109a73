// One call of a rank: what it asks for, how that is packed into a start record, and how it is said in words.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "kernels.h"
#include "ringcomm.h"

namespace ringcomm {

struct Call {
    int collective;
    const std::byte* source;
    std::byte* target;
    uint64_t count;
    int dtype;
    int op;
    double factor;
    int root;
    const uint64_t* counts;  // nullptr: equal blocks

    uint64_t epoch = 0;
    size_t item = 0;  // bytes of an element

    size_t bytes() const { return count * item; }
};

// The blocks of an array that is divided among the ranks, in bytes.
struct Blocks {
    const uint64_t* counts;
    size_t equal, item;

    explicit Blocks(const Call& call, const uint64_t* counts) : counts(counts), equal(call.bytes()), item(call.item) {}
    explicit Blocks(const Call& call) : Blocks(call, call.counts) {}
    size_t bytes(int r) const { return counts ? counts[r] * item : equal; }
    size_t offset(int r) const {
        if (!counts) return r * equal;
        size_t sum = 0;
        for (int p = 0; p < r; ++p) sum += bytes(p);
        return sum;
    }
    size_t largest(int size) const {
        size_t most = 0;
        for (int p = 0; p < size; ++p) most = std::max(most, bytes(p));
        return most;
    }
};

// Kinds of calls beyond the collectives, for the flight record.
enum { CALL_SEND = RC_COLLECTIVES, CALL_RECV, CALLS };

// Set when a rank hopes for direct access: the places in its record are valid, and nothing is staged yet.
constexpr uint64_t SIGNATURE_DIRECT = uint64_t{1} << 63;

uint64_t pack(int kind, int dtype, int op, int root, bool counts);
std::string describe(uint64_t signature, uint64_t count, std::optional<double> factor = {});
const char* kind_name(int kind);

}  // namespace ringcomm
