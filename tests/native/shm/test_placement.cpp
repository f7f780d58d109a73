// A rank leaves a core that it shares: only for a core that its mask allows and no rank is on, and it keeps its mask.
// And a rank that yields its core knows whether a rank or another program had it.
#include "machine/placement.h"

#include <sched.h>

#include "world.h"

using namespace ringcomm;

namespace {

cpu_set_t only(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return set;
}

cpu_set_t allowed() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) _exit(1);
    return set;
}

void allow(const cpu_set_t& set) {
    if (sched_setaffinity(0, sizeof set, &set)) _exit(1);
}

struct Ranks {
    std::shared_ptr<Arena> arena;
    Placement placement;

    explicit Ranks(const std::shared_ptr<File>& file)
        : arena(std::make_shared<Arena>(file, 0, 3, 64 << 10)), placement(arena, 2) {}

    // Where rank 0, which is on `core`, is after it has spun in vain, while rank 1 is on `peer`.
    int after_vain_spin(int core, int peer, const cpu_set_t& mask) {
        allow(only(core));
        if (sched_getcpu() != core) _exit(1);
        arena->rank(1).core.store(peer + 1);
        arena->rank(2).core.store(0);  // it has not been seen yet
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        // The mask is widened on the core, and the kernel does not move a thread that runs unless it has to.
        allow(mask);
        placement.leave_shared_core(0);
        const cpu_set_t after = allowed();
        CHECK(CPU_EQUAL(&mask, &after));
        return arena->rank(0).core.load() - 1;
    }

    // Whether another program has had core 0 in a yield of rank 0 of 4 ms, while rank 1 was on `peer` and yielded after
    // `ms`, and after that rank 0 returned.
    bool lost_core(int peer, int ms) {
        constexpr uint64_t MS = 1'000'000, BEGIN = 100 * MS;
        arena->rank(0).core.store(1);
        arena->rank(0).yielded.store(BEGIN);
        arena->rank(1).core.store(peer + 1);
        arena->rank(1).yielded.store(BEGIN + ms * MS);
        arena->rank(2).core.store(0);
        return placement.lost_core(0, BEGIN, BEGIN + 4 * MS);
    }
};

std::shared_ptr<File> file_for(int ranks) {
    int fd;
    DO(rc_file_create(&fd));
    const auto file = std::make_shared<File>(fd);
    close(fd);
    file->extend_to(PartLayout(ranks, 64 << 10).arena_bytes(ranks));
    return file;
}

// Whether one of `size` ranks on `cores` cores publishes when it yields: its peers need that to see other programs.
bool looks_for_other_programs(int size, int cores) {
    const auto arena = std::make_shared<Arena>(file_for(size), 0, size, 64 << 10);
    Placement placement(arena, cores);
    placement.yield(0);
    return arena->rank(0).yielded.load() != 0;
}

}  // namespace

int main() {
    const cpu_set_t all = allowed();
    if (CPU_COUNT(&all) < 2) return 0;
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    int second = first + 1;
    while (!CPU_ISSET(second, &all)) ++second;
    cpu_set_t two = only(first);
    CPU_SET(second, &two);

    Ranks ranks(file_for(3));
    CHECK(ranks.after_vain_spin(first, first, two) == second);
    CHECK(ranks.after_vain_spin(second, second, two) == first);
    CHECK(ranks.after_vain_spin(first, first, only(first)) == first);  // the user has bound it
    CHECK(ranks.after_vain_spin(first, second, two) != second);        // it has its core to itself
    CHECK(!ranks.lost_core(0, 4));                                     // the ranks had it in turn
    CHECK(ranks.lost_core(0, 1));                                      // then another program
    CHECK(ranks.lost_core(1, 4));                                      // rank 1 is on another core
    CHECK(!ranks.placement.lost_core(0, 0, 900'000));
    // The cores that the ranks may use count, however many the machine has.
    for (const int cores : {1, 2, 3}) {
        CHECK(looks_for_other_programs(Placement::CROWD * cores, cores));
        CHECK(!looks_for_other_programs(Placement::CROWD * cores + 1, cores));
    }
    return failures ? 1 : 0;
}
