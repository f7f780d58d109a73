// The choice of stores: which of the two a copy takes, by a clock that this test sets.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/stores.h"

using namespace ringcomm;

namespace {

uint64_t clock_ns = 0;
std::vector<uint64_t> steps;  // of the next looks at the clock

uint64_t scripted_clock() {
    if (!steps.empty()) {
        clock_ns += steps.front();
        steps.erase(steps.begin());
    }
    return clock_ns;
}

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

constexpr size_t LONG = 64 << 10;
std::vector<std::byte> own(1 << 20), shared(1 << 20);

struct Staging {
    TimedStagingStores<scripted_clock> stores{0};
    uint32_t copies = 0;

    bool streams() const { return stores.nontemporal(LONG, 1.2); }
    // One copy, while ordinary and non-temporal stores would take so long.
    void copy(uint64_t ordinary, uint64_t streamed) {
        const bool tries = copies < 8 || copies % 32 == 0;
        const bool odd = (copies < 8 ? copies : copies / 32) % 2;
        steps = {0, (tries ? odd : streams()) ? streamed : ordinary};
        stores.copy(shared.data(), own.data(), LONG, 1.2);
        ++copies;
    }
    void copy_many(int number, uint64_t ordinary, uint64_t streamed) {
        for (int i = 0; i < number; ++i) copy(ordinary, streamed);
    }
};

void test_staging() {
    Staging staging;
    expect(!staging.streams(), "ordinary stores before anything is measured");
    staging.copy(20'000, 5'000);
    expect(!staging.streams(), "ordinary stores before both are measured");
    staging.copy_many(7, 20'000, 5'000);
    expect(staging.streams(), "non-temporal stores where they are faster");
    staging.copy(20'000, 1'000'000);  // interrupted
    expect(staging.streams(), "one interrupted copy changes nothing");
    staging.copy_many(16, 5'000, 40'000);  // the host moves the cores
    staging.copy_many(80, 5'000, 40'000);
    expect(!staging.streams(), "ordinary stores soon after they have become faster");
    staging.copy_many(12, 40'000, 5'000);
    expect(staging.streams(), "non-temporal stores a few copies after they have become faster");
    staging.copy_many(200, 5'000, 4'900);
    expect(!staging.streams(), "ordinary stores where the others save less than the reader loses");

    TimedStagingStores<scripted_clock> by_size(LONG);
    expect(by_size.nontemporal(LONG, 1.2) && !by_size.nontemporal(LONG - 1, 1.2), "the size that is set decides");
}

void test_output() {
    TimedOutputStores<scripted_clock> stores;
    // Returns how often the clock was read: a third time only if the rest was streamed.
    const auto copy = [&](uint64_t first, uint64_t rest) {
        steps = {0, first, rest};
        for (size_t i = 0; i < own.size(); ++i) own[i] = std::byte(i * 7 + first);
        stores.copy(shared.data(), own.data(), own.size());
        expect(shared == own, "the output is the input");
        return 3 - int(steps.size());
    };
    const uint64_t rest = 63 * 400;  // 63 parts of 16 KiB, 400 ns each, by non-temporal stores
    expect(copy(300, rest) == 3 && copy(300, rest) == 3, "unknown: non-temporal stores");
    expect(copy(300, rest) == 2, "a cache holds the output: ordinary stores");
    expect(copy(1200, rest) == 3, "no cache holds the output: non-temporal stores");
    copy(1200, 100 * rest);  // interrupted
    expect(copy(1200, rest) == 3, "one interrupted copy changes nothing");
    int streamed = 0;
    for (int i = 0; i < 1000; ++i) streamed += copy(300, rest) == 3;
    expect(streamed > 10 && streamed < 70, "a cached output is streamed now and then, to measure it again");
}

}  // namespace

int main() {
    test_staging();
    test_output();
    return 0;
}
