// The C ABI: checks what the caller gave, then calls the core.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "engine.h"
#include "letters.h"
#include "probe.h"

using namespace ringcomm;

namespace {

// What belongs to one rank of one communicator, until close().
struct Core {
    Comm comm;
    Engine engine{comm};
    Letters letters{comm};

    template <class... Arguments>
    explicit Core(Arguments&&... arguments) : comm(std::forward<Arguments>(arguments)...) {}
};

// Keeps close() from pulling the memory away under a running call.
struct Door {
    template <class... Arguments>
    explicit Door(Arguments&&... arguments)
        : core(std::make_unique<Core>(std::forward<Arguments>(arguments)...)), comm(&core->comm) {}

    std::unique_ptr<Core> core;
    const Comm* const comm;  // only to be compared
    const uint64_t generation = fork_generation.load();
    std::atomic<bool> closed{false};
    std::atomic<int> inside{0};

    bool forked() const { return generation != fork_generation.load(std::memory_order_relaxed); }
};

class Visit {
public:
    explicit Visit(Door& door) : door_(door) {
        if (door.forked()) {
            throw Failure(RC_CLOSED,
                          "this communicator belongs to the parent process; after a fork the child must call "
                          "ringcomm.init for itself");
        }
        door.inside.fetch_add(1);
        if (!door.closed.load()) return;
        door.inside.fetch_sub(1);
        throw Failure(RC_CLOSED, "this communicator is closed");
    }
    ~Visit() { door_.inside.fetch_sub(1); }
    Visit(const Visit&) = delete;

    Comm& comm() const { return door_.core->comm; }
    Core* operator->() const { return door_.core.get(); }

private:
    Door& door_;
};

[[noreturn]] void refuse(const std::string& message, const std::string& expected = "", const std::string& got = "") {
    Failure failure(RC_ARGUMENT, message);
    copy_text(failure.error.expected, sizeof failure.error.expected, expected);
    copy_text(failure.error.got, sizeof failure.error.got, got);
    throw failure;
}

// Nothing that waits in line behind the interrupted call may be waited for.
void refuse_in_signal_handler(const Comm& comm) {
    if (handling_signals_in != &comm) return;
    refuse(
        "a signal handler may not wait for a communicator that it has interrupted: expected abort(), close() or an "
        "exception");
}

void check_rank(const char* name, int value, int least, int size) {
    if (value < least || value >= size) refuse(format("%s is %d, but the ranks are 0 to %d", name, value, size - 1));
}

void check_dtype(int dtype) {
    if (dtype < 0 || dtype >= RC_DTYPES) refuse(format("there is no dtype %d", dtype));
}

// Two buffers must be disjoint, or the same place as far as the collective allows it.
void check_overlap(const Call& call, int rank, int size) {
    const uint64_t* counts = call.counts;
    uint64_t all = counts ? 0 : call.count * size, before = counts ? 0 : call.count * rank;
    for (int p = 0; counts && p < size; ++p) {
        all += counts[p];
        if (p < rank) before += counts[p];
    }
    uint64_t source_count = call.count, target_count = call.count;
    const std::byte *source = call.source, *target = call.target;
    bool same = source == target;  // the allowed form of "in place"
    switch (call.collective) {
        case RC_GATHER:
        case RC_ALL_GATHER:
            target_count = all;
            same = source == target + before * call.item;
            break;
        case RC_SCATTER:
        case RC_REDUCE_SCATTER:
            source_count = all;
            same = target == source + before * call.item;
            break;
        case RC_ALL_TO_ALL:
            source_count = target_count = all;
            if (counts) {
                target_count = 0;
                for (int p = 0; p < size; ++p) target_count += counts[size + p];
                same = same && std::equal(counts, counts + size, counts + size);
            }
            break;
        default: break;
    }
    if (!source || !target || same || !source_count || !target_count) return;
    if (source < target + target_count * call.item && target < source + source_count * call.item) {
        refuse("the output overlaps the input", "separate memory, or the place that this collective calls 'in place'",
               format("%" PRIu64 " elements at %p into %" PRIu64 " at %p", source_count,
                      static_cast<const void*>(source), target_count, static_cast<const void*>(target)));
    }
}

void check_call(Call& call, int rank, int size) {
    if (call.collective < 0 || call.collective >= RC_COLLECTIVES)
        refuse(format("there is no collective %d", call.collective));
    check_dtype(call.dtype);
    call.item = dtype_bytes(call.dtype);
    switch (call.collective) {
        case RC_REDUCE:
        case RC_ALL_REDUCE:
        case RC_REDUCE_SCATTER:
            if (!rc_reducible(call.dtype, call.op)) {
                refuse(format("%s of %s makes no sense or is not supported", op_name(call.op), dtype_name(call.dtype)));
            }
            break;
        default: break;
    }
    switch (call.collective) {
        case RC_BROADCAST:
        case RC_REDUCE:
        case RC_GATHER:
        case RC_SCATTER: check_rank("root", call.root, 0, size); break;
        default: break;
    }
    check_overlap(call, rank, size);
}

template <class Body>
int visit(const std::shared_ptr<Door>& door, Body body) {
    return guarded([&] {
        const Visit visit(*door);
        body(visit);
    });
}

}  // namespace

struct rc_comm {
    std::shared_ptr<Door> door;
};

struct rc_work {
    std::shared_ptr<Door> door;
    std::shared_ptr<Work> work;
};

struct rc_region {
    std::shared_ptr<Door> door;
    std::shared_ptr<Region> region;
};

const rc_error* rc_last_error(void) { return &last_error(); }

void rc_set_interrupt(int (*interrupt)(void)) { interrupt_function.store(interrupt); }

void rc_after_fork(void) { fork_generation.fetch_add(1); }

int rc_kernels_select(const char* level) {
    return guarded([&] {
        if (!select_kernels(level)) {
            refuse(format("this CPU has no kernels '%s': expected portable, avx2 or avx512, or nothing for the best",
                          level));
        }
    });
}

const char* rc_kernels_name(void) { return kernels().name; }

int rc_dtype_bytes(int dtype) { return dtype < 0 || dtype >= RC_DTYPES ? 0 : int(dtype_bytes(dtype)); }

int rc_reducible(int dtype, int op) {
    return dtype >= 0 && dtype < RC_DTYPES && op >= 0 && op < RC_OPS && kernels().reduce[dtype][op] != nullptr;
}

int rc_reduce(void* dst, const void* const* srcs, int n, uint64_t count, int dtype, int op, double factor) {
    return guarded([&] {
        if (!rc_reducible(dtype, op)) refuse("this operation makes no sense for this dtype");
        if (count) kernels().reduce[dtype][op](dst, srcs, n, count, factor);
    });
}

int rc_probe_handover(uint64_t bytes, double* ordinary, double* streamed) {
    return guarded([&] {
        *ordinary = probe_handover(bytes, false);
        *streamed = probe_handover(bytes, true);
    });
}

uint64_t rc_world_bytes(int size, const rc_tuning* tuning) {
    return Layout(size, tuning->arena_bytes).arena_bytes(size);
}

uint64_t rc_sub_bytes(int size, const rc_tuning* tuning) {
    return Layout(size, tuning->sub_arena_bytes).arena_bytes(size);
}

int rc_file_create(int* fd) {
    return guarded([&] { *fd = create_file(); });
}

int rc_world_open(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce,
                  const rc_tuning* tuning, rc_comm** comm) {
    return guarded([&] {
        if (size < 1) refuse(format("size is %d, expected at least 1", size));
        check_rank("rank", rank, 0, size);
        if (rank == 0) File(fd).extend_to(rc_world_bytes(size, tuning));
        auto world = std::make_shared<World>(fd, size, pids, pidfds, *tuning);
        std::vector<int> members(size);
        for (int r = 0; r < size; ++r) members[r] = r;
        auto arena = world->arena;
        const auto door = std::make_shared<Door>(world, arena, std::vector<std::shared_ptr<Arena>>{}, rank, members);
        door->core->comm.ready();
        GroupHeader& group = arena->group();
        if (rank == 0) {
            group.file_end.store(arena->layout.arena_bytes(size));
            group.nonce.store(nonce);
        } else if (group.nonce.load() != nonce) {
            throw Failure(RC_SYSTEM,
                          "the shared memory does not hold rank 0's nonce: the ranks do not share this memory", rank);
        }
        *comm = new rc_comm{door};
    });
}

int rc_reserve(rc_comm* comm, uint64_t bytes, uint64_t* offset) {
    return visit(comm->door, [&](const Visit& visit) { *offset = visit.comm().world->reserve(bytes); });
}

int rc_sub_open(rc_comm* parent, uint64_t offset, int rank, int size, const int* members, rc_comm** comm) {
    return visit(parent->door, [&](const Visit& visit) {
        Comm& above = visit.comm();
        auto ancestors = above.ancestors();
        ancestors.push_back(above.shared_arena());
        std::vector<int> in_world(size);
        for (int r = 0; r < size; ++r) in_world[r] = above.members[members[r]];
        auto arena = std::make_shared<Arena>(above.world->file, offset, size, above.tuning().sub_arena_bytes);
        *comm = new rc_comm{
            std::make_shared<Door>(above.world, std::move(arena), std::move(ancestors), rank, std::move(in_world))};
    });
}

int rc_abort(rc_comm* comm, int status, const char* reason) {
    return visit(comm->door,
                 [&](const Visit& visit) { visit.comm().store_failure(Failure(status, reason, visit.comm().rank)); });
}

int rc_close(rc_comm* comm) {
    return guarded([&] {
        Door& door = *comm->door;
        if (door.forked()) return;
        if (handling_signals_in == door.comm) {  // the interrupted call, which keeps all alive, must end first
            door.core->comm.start_closing();
            return;
        }
        if (door.closed.exchange(true)) return;
        door.core->comm.start_closing();
        while (door.inside.load() > 0) give_core_away();
        door.core->engine.stop();
        door.core->letters.stop();
        door.core->comm.finish_closing();
        door.core.reset();
    });
}

void rc_free(rc_comm* comm) {
    if (!comm || comm->door->forked()) return;
    rc_close(comm);
    delete comm;
}

int rc_check(rc_comm* comm) {
    return visit(comm->door, [&](const Visit& visit) { visit.comm().check_failure(); });
}

int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return visit(comm->door, [&](const Visit& visit) { copy_text(text, bytes, visit.comm().report(calls)); });
}

int rc_collective(rc_comm* comm, int collective, const void* source, void* target, uint64_t count, int dtype, int op,
                  double factor, int root, const uint64_t* counts, double timeout, rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        Call call{collective,
                  static_cast<const std::byte*>(source),
                  static_cast<std::byte*>(target),
                  count,
                  dtype,
                  op,
                  factor,
                  root,
                  counts};
        check_call(call, visit.comm().rank, visit.comm().size);
        if (work) {
            *work = new rc_work{comm->door, visit->engine.queue(call, timeout)};
        } else {
            refuse_in_signal_handler(visit.comm());
            visit->engine.run(call, timeout);
        }
    });
}

int rc_send(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
            rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        check_dtype(dtype);
        check_rank("peer", peer, 0, visit.comm().size);
        const auto parcel = visit->letters.send(static_cast<const std::byte*>(data), count, dtype, peer, tag, timeout);
        if (work) {
            visit->letters.in_background(parcel);
            *work = new rc_work{comm->door, parcel};
        } else {
            visit->letters.wait(*parcel);
            parcel->result();
        }
    });
}

int rc_recv(rc_comm* comm, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout, int* source,
            rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        check_dtype(dtype);
        check_rank("peer", peer, -1, visit.comm().size);
        const auto parcel = visit->letters.receive(static_cast<std::byte*>(data), count, dtype, peer, tag, timeout);
        if (work) {
            visit->letters.in_background(parcel);
            *work = new rc_work{comm->door, parcel};
        } else {
            visit->letters.wait(*parcel);
            parcel->result();
            if (source) *source = parcel->source;
        }
    });
}

int rc_sendrecv(rc_comm* comm, const void* data, uint64_t count, int dtype, int dest, void* target,
                uint64_t target_count, int target_dtype, int source, int64_t tag, double timeout, int* from) {
    return visit(comm->door, [&](const Visit& visit) {
        check_dtype(dtype);
        check_dtype(target_dtype);
        check_rank("dest", dest, 0, visit.comm().size);
        check_rank("source", source, -1, visit.comm().size);
        const auto received =
            visit->letters.receive(static_cast<std::byte*>(target), target_count, target_dtype, source, tag, timeout);
        const auto sent = visit->letters.send(static_cast<const std::byte*>(data), count, dtype, dest, tag, timeout);
        visit->letters.wait(*sent);
        visit->letters.wait(*received);
        sent->result();
        received->result();
        if (from) *from = received->source;
    });
}

int rc_work_wait(rc_work* work, double timeout, int* source) {
    return guarded([&] {
        if (!work->work->done()) {
            const Visit visit(*work->door);
            refuse_in_signal_handler(visit.comm());
            work->work->wait(visit.comm(), timeout < 0 ? UINT64_MAX : deadline_of(now_ns(), timeout));
        }
        work->work->result();
        if (source) *source = work->work->source;
    });
}

int rc_work_done(rc_work* work) { return work->work->done(); }

void rc_work_free(rc_work* work) {
    if (work && !work->door->forked()) delete work;
}

uint64_t rc_region_bytes(uint64_t bytes) { return region_part_bytes(bytes); }

int rc_region_open(rc_comm* comm, uint64_t offset, uint64_t bytes, rc_region** region) {
    return visit(comm->door, [&](const Visit& visit) {
        Comm& inside = visit.comm();
        auto opened = std::make_shared<Region>(inside.world->file, offset, bytes, inside.rank, inside.size);
        inside.regions.add(opened);
        *region = new rc_region{comm->door, std::move(opened)};
    });
}

void* rc_region_data(rc_region* region) { return region->region->data(); }

void rc_region_free(rc_region* region) {
    if (!region || region->door->forked()) return;
    try {
        const Visit visit(*region->door);
        visit.comm().regions.release(*region->region);
    } catch (const Failure&) {
        region->region->release();  // the communicator is closed: its table let go of the region then
    }
    delete region;
}
