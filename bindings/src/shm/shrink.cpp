// The decision about who is left of a group.
#include "shm/shrink.h"

#include <algorithm>

namespace ringcomm {

namespace {

// The list lies before the arena that it is for.
struct List {
    uint32_t count;
    uint32_t ranks[];
};

size_t list_bytes(int size) { return round_up(sizeof(List) + size * sizeof(uint32_t), PAGE); }

bool takes_part(const ShmGroup& group, int r) { return group.header(r).takes_part.load() != 0; }

bool lost(const ShmGroup& group, int r) {
    return group.closed(r) || group.world->liveness.dead(group.memory().members[r]);
}

void wake_others(const ShmGroup& group) {
    for (int p = 0; p < group.size; ++p) {
        if (p != group.rank) wake_all(group.header(p).p2p_doorbell);
    }
}

// A rank that can still come; -1: none.
int missing(const ShmGroup& group) {
    for (int r = 0; r < group.size; ++r) {
        if (r != group.rank && !takes_part(group, r) && !lost(group, r)) return r;
    }
    return -1;
}

class Checks final : public WaitChecks {
public:
    Checks(ShmGroup& group, uint64_t deadline) : group_(group), deadline_(deadline) {}

    // The failure of the communicator is why this rank is here.
    std::optional<Failure> stop_reason() override {
        group_.check_interrupt("shrink");
        if (group_.closing()) return Failure(RC_CLOSED, "this communicator was closed during shrink", group_.rank);
        on_long_wait();
        return {};
    }
    void on_long_wait() override { group_.set_waits_for(missing(group_)); }
    [[noreturn]] void fail(const Failure& failure) override { throw failure; }
    uint64_t deadline() const override { return deadline_; }

private:
    ShmGroup& group_;
    const uint64_t deadline_;
};

// The ranks that can still miss the decision, and the one that makes it.
bool ready(const ShmGroup& group, uint64_t deadline) {
    if (group.arena().group().successor.load() || now_ns() >= deadline) return true;
    if (missing(group) >= 0) return false;
    int first = 0;
    while (first < group.rank && (!takes_part(group, first) || lost(group, first))) ++first;
    return first == group.rank;  // else that rank decides
}

void decide(const ShmGroup& group) {
    std::vector<uint32_t> ranks;
    for (int r = 0; r < group.size; ++r) {
        if (takes_part(group, r) && !lost(group, r)) ranks.push_back(r);
    }
    const int size = int(ranks.size());
    const size_t before = list_bytes(group.size);
    const uint64_t arena = PartLayout(size, group.tuning().arena_bytes).arena_bytes(size);
    const uint64_t offset = group.world->reserve(before + arena);
    group.world->file->allocate(offset, before);
    const auto mapping = group.world->file->map(offset, before);
    List& list = *reinterpret_cast<List*>(mapping->base());
    list.count = size;
    std::copy(ranks.begin(), ranks.end(), list.ranks);
    uint64_t none = 0;
    if (!group.arena().group().successor.compare_exchange_strong(none, offset)) {
        group.world->file->discard(offset, before);  // another rank, whose time was up as well, was faster
    }
}

Survivors decided(const ShmGroup& group) {
    const uint64_t offset = group.arena().group().successor.load();
    const size_t before = list_bytes(group.size);
    const auto mapping = group.world->file->map(offset, before);
    const List& list = *reinterpret_cast<const List*>(mapping->base());
    Survivors survivors{{list.ranks, list.ranks + list.count}, offset + before};
    if (std::find(survivors.ranks.begin(), survivors.ranks.end(), group.rank) != survivors.ranks.end())
        return survivors;
    throw Failure(RC_ABORTED,
                  format("rank %d was left out: it called shrink when ", group.rank) + name_ranks(survivors.ranks) +
                      " had continued without it",
                  group.rank);
}

}  // namespace

Survivors agree_on_survivors(ShmGroup& group, uint64_t deadline) {
    group.mine().takes_part.store(1);
    wake_others(group);
    try {
        Checks checks(group, deadline);
        wait_until([&] { return ready(group, deadline); }, group.sleeper(), IDLE, checks);
        if (!group.arena().group().successor.load()) decide(group);
        group.flight.clear_waits_for();
    } catch (...) {  // the others need not wait for it in the new group
        group.mine().takes_part.store(0);
        group.flight.clear_waits_for();
        throw;
    }
    wake_others(group);
    return decided(group);
}

}  // namespace ringcomm
