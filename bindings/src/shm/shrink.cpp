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

bool takes_part(const Comm& comm, int r) { return comm.header(r).takes_part.load() != 0; }

bool lost(const Comm& comm, int r) { return comm.closed(r) || comm.world->liveness.dead(comm.group().members[r]); }

void wake_others(const Comm& comm) {
    for (int p = 0; p < comm.size; ++p) {
        if (p != comm.rank) wake_all(comm.header(p).p2p_doorbell);
    }
}

// A rank that can still come; -1: none.
int missing(const Comm& comm) {
    for (int r = 0; r < comm.size; ++r) {
        if (r != comm.rank && !takes_part(comm, r) && !lost(comm, r)) return r;
    }
    return -1;
}

class Checks final : public WaitChecks {
public:
    Checks(Comm& comm, uint64_t deadline) : comm_(comm), deadline_(deadline) {}

    // The failure of the communicator is why this rank is here.
    std::optional<Failure> stop_reason() override {
        comm_.check_interrupt("shrink");
        if (comm_.closing()) return Failure(RC_CLOSED, "this communicator was closed during shrink", comm_.rank);
        on_long_wait();
        return {};
    }
    void on_long_wait() override { comm_.set_waits_for(missing(comm_)); }
    [[noreturn]] void fail(const Failure& failure) override { throw failure; }
    uint64_t deadline() const override { return deadline_; }

private:
    Comm& comm_;
    const uint64_t deadline_;
};

// The ranks that can still miss the decision, and the one that makes it.
bool ready(const Comm& comm, uint64_t deadline) {
    if (comm.arena().group().successor.load() || now_ns() >= deadline) return true;
    if (missing(comm) >= 0) return false;
    int first = 0;
    while (first < comm.rank && (!takes_part(comm, first) || lost(comm, first))) ++first;
    return first == comm.rank;  // else that rank decides
}

void decide(const Comm& comm) {
    std::vector<uint32_t> ranks;
    for (int r = 0; r < comm.size; ++r) {
        if (takes_part(comm, r) && !lost(comm, r)) ranks.push_back(r);
    }
    const int size = int(ranks.size());
    const size_t before = list_bytes(comm.size);
    const uint64_t arena = PartLayout(size, comm.tuning().arena_bytes).arena_bytes(size);
    const uint64_t offset = comm.world->reserve(before + arena);
    comm.world->file->allocate(offset, before);
    const auto mapping = comm.world->file->map(offset, before);
    List& list = *reinterpret_cast<List*>(mapping->base());
    list.count = size;
    std::copy(ranks.begin(), ranks.end(), list.ranks);
    uint64_t none = 0;
    if (!comm.arena().group().successor.compare_exchange_strong(none, offset)) {
        comm.world->file->discard(offset, before);  // another rank, whose time was up as well, was faster
    }
}

Survivors decided(const Comm& comm) {
    const uint64_t offset = comm.arena().group().successor.load();
    const size_t before = list_bytes(comm.size);
    const auto mapping = comm.world->file->map(offset, before);
    const List& list = *reinterpret_cast<const List*>(mapping->base());
    Survivors survivors{{list.ranks, list.ranks + list.count}, offset + before};
    if (std::find(survivors.ranks.begin(), survivors.ranks.end(), comm.rank) != survivors.ranks.end()) return survivors;
    throw Failure(RC_ABORTED,
                  format("rank %d was left out: it called shrink when ", comm.rank) + name_ranks(survivors.ranks) +
                      " had continued without it",
                  comm.rank);
}

}  // namespace

Survivors agree_on_survivors(Comm& comm, uint64_t deadline) {
    comm.mine().takes_part.store(1);
    wake_others(comm);
    try {
        Checks checks(comm, deadline);
        wait_until([&] { return ready(comm, deadline); }, comm.sleeper(), IDLE, checks);
        if (!comm.arena().group().successor.load()) decide(comm);
        comm.flight.clear_waits_for();
    } catch (...) {  // the others need not wait for it in the new group
        comm.mine().takes_part.store(0);
        comm.flight.clear_waits_for();
        throw;
    }
    wake_others(comm);
    return decided(comm);
}

}  // namespace ringcomm
