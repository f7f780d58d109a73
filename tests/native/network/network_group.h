// What the tests of communicators between hosts share: layouts, data, programs of large calls.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <numeric>

#include "network_world.h"

constexpr uint64_t LARGE = 300'001;  // elements of int32: five pieces of a transfer
constexpr int UNTOUCHED = -77;

const char* const LAYOUTS[]{"01", "0011", "0101", "0001", "012", "01012"};

inline std::string message_of(int status, int expected) {
    if (status != expected)
        fprintf(stderr, "status %d instead of %d: %s\n", status, expected, rc_last_error()->message);
    CHECK(status == expected);
    return status ? rc_last_error()->message : "";
}

inline std::vector<int> numbers(size_t count, int first) {
    std::vector<int> found(count);
    std::iota(found.begin(), found.end(), first);
    return found;
}

// The sum of numbers(count, rank) over all ranks.
inline bool is_sum(const std::vector<int>& sum, int size) {
    for (size_t i = 0; i < sum.size(); ++i) {
        if (sum[i] != size * int(i) + size * (size - 1) / 2) return false;
    }
    return true;
}

inline rc_block block(int memory, uint64_t begin, uint64_t length) { return {memory, begin, length}; }

inline rc_step exchange(int peer, rc_block outgoing, rc_block incoming, rc_block operand = {}) {
    rc_step step{};
    step.kind = RC_STEP_EXCHANGE;
    step.dest = step.source = peer;
    step.outgoing = outgoing;
    step.incoming = incoming;
    step.operand = operand;
    return step;
}

inline rc_step inside(int collective, rc_block outgoing, rc_block incoming, uint64_t count) {
    rc_step step{};
    step.kind = RC_STEP_LOCAL;
    step.collective = collective;
    step.dest = step.source = -1;
    step.outgoing = outgoing;
    step.incoming = incoming;
    step.count = count;
    return step;
}

inline rc_step copy(rc_block outgoing, rc_block incoming) {
    rc_step step{};
    step.kind = RC_STEP_COPY;
    step.dest = step.source = -1;
    step.outgoing = outgoing;
    step.incoming = incoming;
    return step;
}

// An all_reduce on "01", or on "0011" in slices, and in two chunks whose stages overlap.
inline void add_sum(const NetworkRank& at, uint64_t count, const int* source, int* target) {
    const rc_block in = block(RC_MEMORY_IN, 0, count), out = block(RC_MEMORY_OUT, 0, count);
    std::vector<rc_step> steps;
    if (at.size == 2) {
        const rc_block landed = block(RC_MEMORY_SCRATCH, 0, count);
        steps = {exchange(1 - at.rank, in, landed, in), copy(landed, out)};
    } else {
        const int peer = (at.rank + 2) % 4;
        rc_step to[2], between[2], from[2];
        for (int i = 0; i < 2; ++i) {
            const uint64_t begin = i ? count / 4 * 2 : 0, length = i ? count - begin : count / 4 * 2;
            const rc_block half = block(RC_MEMORY_SCRATCH, begin, length / 2),
                           sum = block(RC_MEMORY_SCRATCH, count + begin, length / 2);
            to[i] = inside(RC_REDUCE_SCATTER, block(RC_MEMORY_IN, begin, length), half, length / 2);
            between[i] = exchange(peer, half, sum, half);
            from[i] = inside(RC_ALL_GATHER, sum, block(RC_MEMORY_OUT, begin, length), length / 2);
        }
        to[1].overlaps = from[0].overlaps = 1;
        steps = {to[0], between[0], to[1], between[1], from[0], from[1]};
    }
    const rc_call call{source, target, count, RC_INT32, RC_SUM, 1.0, 0, nullptr, nullptr};
    DO(rc_add_program(at.comm, RC_ALL_REDUCE, &call, 7, 2 * count, steps.data(), int(steps.size())));
}

inline void check_usable(const NetworkRank& at) {
    const std::vector<int> x = numbers(10, at.rank);
    std::vector<int> sum(10);
    DO(run(at.comm, RC_ALL_REDUCE, x.data(), sum.data(), 10));
    CHECK(is_sum(sum, at.size));
}

using Test = void (*)(NetworkRank&);

inline void on(std::initializer_list<const char*> layouts, const rc_tuning& tuning, std::initializer_list<Test> tests,
               Connected when = Connected::AT_FIRST) {
    for (const char* layout : layouts) {
        for (const Test test : tests) on_hosts(layout, tuning, test, when);
    }
}
