// A collective call: its arguments, and the blocks of its arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "core/collectives.h"
#include "core/signature.h"

namespace ringcomm {

struct CallRecord {
    int collective;
    const std::byte* source;
    std::byte* target;
    uint64_t count;
    int dtype;
    int op;
    double factor;
    int root;
    const uint64_t* counts;                // nullptr: equal blocks
    double timeout;                        // seconds
    int32_t* deferred_mismatch = nullptr;  // as in rc_call
    size_t item = 0;                       // bytes of an element
    bool agrees_only = false;              // the ranks only compare their calls: the data is on GPUs

    // Known when the call begins.
    uint64_t epoch = 0, start = 0, flight = 0;  // ns, tick_ns(); its number in the flight record
    Signature signature{};
    bool started = false;  // by start_collective()

    // Whether the other ranks may go on with further parts of the same call.
    bool is_part() const { return deferred_mismatch || agrees_only || collectives[collective].moves_as != collective; }
    size_t bytes() const { return count * item; }
    // Of the larger of its arrays; of counts, what this rank sends or all ranks together have.
    uint64_t elements(int size) const {
        if (counts) return std::accumulate(counts, counts + size, uint64_t{0});
        const Data given = collectives[collective].given, got = collectives[collective].got;
        if (given == Data::NOTHING) return 0;
        return count * (given == Data::ARRAY && got == Data::ARRAY ? 1 : size);
    }
};

Signature signature_of(const CallRecord& call, int size);

// The blocks of an array that is divided among the ranks, in bytes.
struct Blocks {
    const uint64_t* counts;
    size_t equal, item;

    explicit Blocks(const CallRecord& call, const uint64_t* counts)
        : counts(counts), equal(call.bytes()), item(call.item) {}
    explicit Blocks(const CallRecord& call) : Blocks(call, call.counts) {}
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

}  // namespace ringcomm
