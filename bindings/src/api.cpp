// The C ABI: every function checks what the caller gave, then calls the core.
#include <unistd.h>

#include "check.h"
#include "door.h"
#include "probe.h"

using namespace ringcomm;

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

namespace {

Message outgoing(const void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout) {
    // A send never writes through the pointer.
    return {static_cast<std::byte*>(const_cast<void*>(data)), count, dtype, peer, tag, timeout};
}

Call called(int collective, const void* source, void* target, uint64_t count, int dtype, int op, double factor,
            int root, const uint64_t* counts) {
    return {collective,
            static_cast<const std::byte*>(source),
            static_cast<std::byte*>(target),
            count,
            dtype,
            op,
            factor,
            root,
            counts};
}

}  // namespace

const rc_error* rc_last_error(void) { return &last_error(); }

void rc_set_interrupt(int (*interrupt)(void)) { interrupt_function.store(interrupt); }

void rc_after_fork(void) {
    fork_generation.fetch_add(1);
    forget_done();
}

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

int rc_probe_handover(uint64_t bytes, int writer, int reader, double* ordinary, double* streamed) {
    return guarded([&] {
        *ordinary = probe_handover(bytes, false, writer, reader);
        *streamed = probe_handover(bytes, true, writer, reader);
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
        const auto door = std::make_shared<Door>(world, Group{arena, members}, std::vector<Group>{}, rank);
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
        ancestors.push_back(above.group());
        Group group{std::make_shared<Arena>(above.world->file, offset, size, above.tuning().sub_arena_bytes), {}};
        for (int r = 0; r < size; ++r) group.members.push_back(above.group().members[members[r]]);
        *comm = new rc_comm{std::make_shared<Door>(above.world, std::move(group), std::move(ancestors), rank)};
    });
}

int rc_abort(rc_comm* comm, int status, int rank, const char* reason) {
    return visit(comm->door, [&](const Visit& visit) { visit.comm().store_failure(Failure(status, reason, rank)); });
}

int rc_gone(rc_comm* comm, int rank, int* gone) {
    return visit(comm->door, [&](const Visit& visit) { *gone = visit.comm().gone(rank, "").has_value(); });
}

int rc_close(rc_comm* comm) {
    return guarded([&] {
        Door& door = *comm->door;
        if (door.forked() || door.closed.load()) return;
        try {
            const Visit visit(door);
            visit.comm().start_closing();
            if (visit.comm().interrupted_here()) {
                throw Failure(RC_INTERRUPTED, "closed by a signal handler: the call that it interrupted ends first");
            }
        } catch (const Failure& failure) {
            if (failure.error.code == RC_CLOSED) return;  // by another thread
            throw;
        }
        if (door.closed.exchange(true)) return;
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

int rc_last_way(rc_comm* comm, int* way, uint64_t* chunks) {
    return visit(comm->door, [&](const Visit& visit) {
        const uint64_t last = visit.comm().way.load(std::memory_order_relaxed);
        *way = int(last % RC_WAYS);
        *chunks = last / RC_WAYS;
    });
}

int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return visit(comm->door, [&](const Visit& visit) {
        std::string lines;
        for (int r = 0; r < visit.comm().size; ++r) lines += visit.comm().report(r, calls) + "\n";
        copy_text(text, bytes, lines);
    });
}

int rc_collective(rc_comm* comm, int collective, const void* source, void* target, uint64_t count, int dtype, int op,
                  double factor, int root, const uint64_t* counts, double timeout, rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        Call call = called(collective, source, target, count, dtype, op, factor, root, counts);
        check_call(call, visit.comm().rank, visit.comm().size);
        if (work) {
            *work = new rc_work{comm->door, visit->engine.queue(call, timeout)};
        } else {
            refuse_in_signal_handler(visit.comm());
            visit->engine.run(call, timeout);
        }
    });
}

int rc_describe(int collective, uint64_t count, int dtype, int op, double factor, int root, int with_counts, char* text,
                uint64_t bytes) {
    return guarded([&] {
        check_collective(collective);
        check_dtype(dtype);
        copy_text(text, bytes, describe(pack(collective, dtype, op, root, with_counts), count, factor));
    });
}

int rc_check_collective(int rank, int size, int collective, const void* source, void* target, uint64_t count, int dtype,
                        int op, double factor, int root, const uint64_t* counts) {
    return guarded([&] {
        Call call = called(collective, source, target, count, dtype, op, factor, root, counts);
        check_call(call, rank, size);
    });
}

int rc_send(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
            rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        check_dtype(dtype);
        check_rank("peer", peer, 0, visit.comm().size);
        const Message message = outgoing(data, count, dtype, peer, tag, timeout);
        if (work) {
            *work = new rc_work{comm->door, visit->letters.start_send(message)};
        } else {
            visit->letters.send(message);
        }
    });
}

int rc_recv(rc_comm* comm, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout, int* source,
            rc_work** work) {
    return visit(comm->door, [&](const Visit& visit) {
        check_dtype(dtype);
        check_rank("peer", peer, -1, visit.comm().size);
        const Message message{static_cast<std::byte*>(data), count, dtype, peer, tag, timeout};
        if (work) {
            *work = new rc_work{comm->door, visit->letters.start_receive(message)};
        } else {
            const int from = visit->letters.receive(message);
            if (source) *source = from;
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
        check_disjoint(data, count * dtype_bytes(dtype), target, target_count * dtype_bytes(target_dtype));
        const Message incoming{static_cast<std::byte*>(target), target_count, target_dtype, source, tag, timeout};
        const int came_from = visit->letters.exchange(outgoing(data, count, dtype, dest, tag, timeout), incoming);
        if (from) *from = came_from;
    });
}

int rc_work_wait(rc_work* work, double timeout, int* source) {
    return guarded([&] {
        Work& call = *work->work;
        if (!call.done()) {
            try {
                const Visit visit(*work->door);
                refuse_in_signal_handler(visit.comm());
                call.wait(visit.comm(), timeout < 0 ? UINT64_MAX : deadline_of(now_ns(), timeout));
            } catch (const Failure& failure) {
                if (work->door->forked() || failure.error.code != RC_CLOSED) throw;
                call.wait_done();  // close() ends every call
            }
        }
        call.result();
        if (source) *source = call.source;
    });
}

int rc_work_done(rc_work* work) { return work->work->done(); }

int rc_work_notify(rc_work* work, uint64_t token) {
    return guarded([&] { work->work->notify(token); });
}

uint64_t rc_next_done(double timeout) { return next_done(timeout); }

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
