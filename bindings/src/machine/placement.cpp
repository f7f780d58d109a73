// Placement: how a rank leaves a core that it shares.
#include "machine/placement.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace ringcomm {

namespace {

constexpr uint64_t REST_NS = 1'000'000;
constexpr uint64_t LOST_NS = 1'000'000;  // less than a slice of the kernel, more than most steps of a rank

int current_core() { return sched_getcpu(); }

}  // namespace

Placement::Placement(std::shared_ptr<Arena> arena, int cores)
    : arena_(std::move(arena)), crowded_(arena_->size > CROWD * cores) {}

void Placement::publish_core(int member) const {
    arena_->rank(member).core.store(current_core() + 1, std::memory_order_relaxed);
}

void Placement::leave_shared_core(int member) {
    publish_core(member);
    const int own = arena_->rank(member).core.load(std::memory_order_relaxed) - 1;
    const uint64_t now = now_ns();
    if (own < 0 || now - moved_.load() < REST_NS) return;
    cpu_set_t mask, free_cores;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return;  // a machine of more cores than a cpu_set_t has
    free_cores = mask;
    bool shared = false;
    for (int r = 0; r < arena_->size; ++r) {
        const int core = arena_->rank(r).core.load(std::memory_order_relaxed) - 1;
        if (core < 0 || core >= CPU_SETSIZE) continue;
        CPU_CLR(core, &free_cores);
        shared |= r != member && core == own;
    }
    const int count = CPU_COUNT(&free_cores);
    if (!shared || count == 0) return;
    int core = -1;
    for (int skipped = member % count; skipped >= 0; ++core) skipped -= CPU_ISSET(core + 1, &free_cores);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    moved_.store(now);
    arena_->rank(member).core.store(core + 1, std::memory_order_relaxed);  // before others look for a free one
    if (sched_setaffinity(0, sizeof one, &one) == 0) sched_setaffinity(0, sizeof mask, &mask);
}

bool Placement::yield(int member) {
    if (crowded_) {
        yield_core();
        return true;
    }
    const uint64_t begin = now_ns();
    if (!pause_.is_over(begin)) return false;
    publish_core(member);
    arena_->rank(member).yielded.store(begin, std::memory_order_relaxed);
    yield_core();
    const uint64_t end = now_ns();
    if (!lost_core(member, begin, end)) return true;
    pause_.start(begin, end);
    return false;
}

bool Placement::lost_core(int member, uint64_t begin, uint64_t end) const {
    if (end - begin < LOST_NS) return false;
    const int core = arena_->rank(member).core.load(std::memory_order_relaxed);
    uint64_t last = begin;
    for (int r = 0; r < arena_->size; ++r) {
        const RankHeader& header = arena_->rank(r);
        if (header.core.load(std::memory_order_relaxed) != core) continue;
        last = std::max(last, header.yielded.load(std::memory_order_relaxed));
    }
    return last + LOST_NS <= end;
}

}  // namespace ringcomm
