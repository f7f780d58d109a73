// Ordinary or non-temporal stores, chosen by timing copies while they run.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "core/waiting.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

// For blocks that another core will read.
//
// Which are faster depends on the size and on where the two cores lie to each other: on Zen 4 a block of 64 KiB is
// written at 19 and 14 GB/s to another hardware thread of the core, at 8 and 35 to another core of the same cache, and
// at 2.5 and 13 across caches. A virtual machine does not know where its cores are, and the operating system moves
// ranks. So the stores in use are timed, those of short blocks in 1 copy of 32, and then either kind is tried in turn.
template <uint64_t (*Clock)() = now_ns>
class TimedStagingStores {
public:
    // Non-temporal ones for blocks of at least this size; 0: as measured.
    explicit TimedStagingStores(uint64_t nontemporal_bytes) : nontemporal_bytes_(nontemporal_bytes) {}

    // Whether non-temporal stores write a block of this size `gain` times as fast, and that saves more than it costs
    // the reader, which fetches the block from memory, not from a cache.
    bool nontemporal(size_t bytes, double gain) const {
        if (nontemporal_bytes_) return bytes >= nontemporal_bytes_;
        const Times& times = times_[size_class(bytes)];
        if (!times.ordinary || !times.streamed) return false;  // not measured yet
        return (times.ordinary - gain * times.streamed) * double(bytes) > FETCH_NS;
    }

    void copy(std::byte* shared, const std::byte* own, size_t bytes, double gain) {
        if (nontemporal_bytes_ || bytes < SHORTEST) return copy_block(shared, own, bytes, nontemporal(bytes, gain));
        Times& times = times_[size_class(bytes)];
        const uint32_t number = times.copies++;
        const bool tries = number < FIRST || number % INTERVAL == 0;
        const bool streams = tries ? (number < FIRST ? number : number / INTERVAL) % 2 : nontemporal(bytes, gain);
        if (!tries && bytes < LONG) return copy_block(shared, own, bytes, streams);
        const uint64_t start = Clock();
        copy_block(shared, own, bytes, streams);
        const float time = float(Clock() - start) / float(bytes);
        float& known = streams ? times.streamed : times.ordinary;
        // The least of the last few: a rank that is interrupted takes longer.
        known = number < 2 ? time : std::min(time, known * FORGETS);
    }

private:
    static constexpr size_t SHORTEST = 1 << 10, LONG = 16 << 10;
    static constexpr double FETCH_NS = 500;
    static constexpr float FORGETS = 1.25;
    static constexpr uint32_t FIRST = 8, INTERVAL = 32;

    struct Times {
        uint32_t copies = 0;
        float ordinary = 0, streamed = 0;  // ns per byte
    };
    static size_t size_class(size_t bytes) { return size_t(std::bit_width(bytes | 1)); }

    const uint64_t nontemporal_bytes_;
    std::array<Times, 65> times_{};
};

// For the output of a call, of this rank or a peer. Non-temporal stores take two thirds of the time where the output is
// in no cache of this core, and 1.7 times as long where it is (Zen 4, Zen 5). The time of the first part shows which.
template <uint64_t (*Clock)() = now_ns>
class TimedOutputStores {
public:
    void copy(std::byte* target, const std::byte* source, size_t bytes) {
        if (bytes < SHORTEST || target == source) return copy_block(target, source, bytes);
        const uint64_t start = Clock();
        copy_block(target, source, FIRST_PART);
        const uint64_t middle = Clock();
        const size_t rest = bytes - FIRST_PART;
        const bool streams = float(middle - start) > streamed_ * float(FIRST_PART);
        copy_block(target + FIRST_PART, source + FIRST_PART, rest, streams);
        if (streams) {
            // Of the last two, because an interrupted copy takes longer.
            const float time = float(Clock() - middle) / float(rest);
            streamed_ = std::min(time, std::exchange(last_, time));
        } else {
            streamed_ *= FADES;  // until it is measured again: where a cache holds the output, in 1 copy of 50
        }
    }

private:
    static constexpr size_t SHORTEST = 64 << 10, FIRST_PART = 16 << 10;
    static constexpr float FADES = 0.99;

    float streamed_ = 0, last_ = 0;  // ns per byte of non-temporal stores
};

using StagingStores = TimedStagingStores<>;
using OutputStores = TimedOutputStores<>;

}  // namespace ringcomm
