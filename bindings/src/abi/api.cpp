// The C ABI of communicators and collectives, and of works: every function checks its arguments, then calls the core.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>

#include "abi/handles.h"
#include "core/signature.h"
#include "kernels/cpu/kernels.h"
#include "machine/latency.h"
#include "network/world.h"

using namespace ringcomm;

const rc_error* rc_last_error(void) { return &last_error(); }

void rc_set_interrupt(int (*interrupt)(void)) { interrupt_function.store(interrupt); }

void rc_after_fork(void) {
    fork_generation.fetch_add(1);
    networks_after_fork();
    reset_completions();
}

int rc_kernels_select(const char* level) {
    return guarded([&] {
        check_pointer("level", level);
        if (!select_kernels(level)) {
            rejectf("this CPU has no kernels '%s': expected portable, avx2 or avx512, or nothing for the best", level);
        }
    });
}

const char* rc_kernels_name(void) { return kernels().name; }

int rc_dtype_bytes(int dtype) { return dtype >= 0 && dtype < RC_DTYPES ? int(dtype_bytes(dtype)) : 0; }

int rc_reduce(void* dst, const void* const* srcs, int n, uint64_t count, int dtype, int op, double factor) {
    return guarded([&] {
        check_reducible(dtype, op);
        check_range("n", n, 1, MAX_SIZE);
        checked_bytes("dst", dst, count, dtype);
        check_pointer("srcs", srcs);
        for (int i = 0; i < n; ++i) checked_bytes("srcs", srcs[i], count, dtype);
        if (count) kernels().reduce[dtype][op](dst, srcs, n, count, factor);
    });
}

int rc_line_latency(int first, int second, double* ns) {
    return guarded([&] {
        check_range("first", first, 0, CPU_SETSIZE - 1);
        check_range("second", second, 0, CPU_SETSIZE - 1);
        check_pointer("ns", ns);
        *ns = line_latency(first, second);
    });
}

int rc_wake_latency(int waker, int sleeper, uint64_t* ns) {
    return guarded([&] {
        check_range("waker", waker, 0, CPU_SETSIZE - 1);
        check_range("sleeper", sleeper, 0, CPU_SETSIZE - 1);
        check_pointer("ns", ns);
        *ns = wake_latency(waker, sleeper);
    });
}

int rc_abort(rc_comm* comm, int status, int rank, const char* reason) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("reason", reason);
        check_range("status", status, RC_OK + 1, RC_SYSTEM);
        check_rank("rank", rank, -1, entry.group().size);
        entry.group().store_failure(Failure(status, reason, rank));
    });
}

int rc_peer_lost(rc_comm* comm, int rank, int* lost) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("lost", lost);
        check_rank("rank", rank, 0, entry.group().size);
        *lost = entry.group().peer_failure(rank, "").has_value();
    });
}

int rc_close(rc_comm* comm) {
    return guarded([&] {
        check_pointer("comm", comm);
        CommHandle& handle = *comm->handle;
        if (handle.forked() || handle.closed.load()) return;
        std::optional<Failure> lost;  // of messages, or of a call; the communicator is closed all the same
        try {
            const EntryGuard entry(handle);
            if (!entry.group().interrupted_here()) lost = entry->p2p.flush();
            entry.group().start_closing();
            if (entry.group().interrupted_here()) {
                throw Failure(RC_INTERRUPTED, "closed by a signal handler: the call that it interrupted ends first");
            }
        } catch (const Failure& failure) {
            if (failure.error.code == RC_CLOSED) return;  // by another thread
            throw;
        }
        if (handle.closed.exchange(true)) return;
        while (handle.inside.load() > 0) yield_core();
        handle.state->collectives.stop();
        handle.state->p2p.stop();
        PeerGroup& group = *handle.state->group;
        for (KeptFailure* const kept : {&group.returned_failure, &group.dropped_failure}) {
            if (!lost && !group.has_failed()) lost = kept->take();
        }
        group.finish_closing();
        handle.state.reset();
        if (!lost) return;
        if (lost->error.code == RC_INTERRUPTED) lost->error.code = RC_ABORTED;  // RC_INTERRUPTED: not closed yet
        throw *lost;
    });
}

void rc_free(rc_comm* comm) {
    if (!comm || comm->handle->forked()) return;
    rc_close(comm);
    delete comm;
}

int rc_check(rc_comm* comm) {
    return enter(comm, [&](const EntryGuard& entry) {
        entry.group().progress();
        entry.group().check_failure();
    });
}

// A group that has failed has only that failure.
static int check_kept(rc_comm* comm, KeptFailure PeerGroup::* kept) {
    return enter(comm, [&](const EntryGuard& entry) {
        if (!entry.group().has_failed()) (entry.group().*kept).check();
    });
}

int rc_check_calls(rc_comm* comm) { return check_kept(comm, &PeerGroup::returned_failure); }

int rc_confirm(rc_comm* comm, double timeout) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_seconds("timeout", timeout);
        reject_in_signal_handler(entry.group());
        entry->collectives.confirm(timeout);
    });
}

int rc_check_dropped(rc_comm* comm) { return check_kept(comm, &PeerGroup::dropped_failure); }

int rc_last_path(rc_comm* comm, int* path, uint64_t* chunks) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("path", path);
        check_pointer("chunks", chunks);
        const uint64_t last = entry.group().last_path.load(std::memory_order_relaxed);
        *path = int(last % RC_PATHS);
        *chunks = last / RC_PATHS;
    });
}

int rc_trace(rc_comm* comm, int fd) {
    return enter(comm, [&](const EntryGuard& entry) {
        if (fd < 0) return entry.group().stop_trace();
        entry.group().start_trace(fd);
    });
}

int rc_group_id(rc_comm* comm, uint64_t* id) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("id", id);
        *id = entry.group().id();
    });
}

int rc_trace_mark(rc_comm* comm, const char* name) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("name", name);
        Trace* trace = entry.group().trace();
        if (!trace) return;
        TraceEntry mark{TRACE_MARK, ticks(), 0, {}};
        mark.end = mark.start;
        copy_text(mark.name, sizeof mark.name, name);
        trace->add(mark);
    });
}

int rc_traced(rc_comm* comm, int* traced) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("traced", traced);
        *traced = entry.group().trace() != nullptr;
    });
}

int rc_trace_parts(rc_comm* comm, int parts) {
    return enter(comm, [&](const EntryGuard& entry) { entry->collectives.trace_parts(parts); });
}

int rc_trace_launch(rc_comm* comm, int collective, int dtype, int root, uint64_t elements, uint64_t begin, uint64_t end,
                    int failed) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_range("collective", collective, 0, RC_COLLECTIVES - 1);
        Trace* trace = entry.group().trace();
        if (!trace) return;
        TraceEntry launch{signature_of(collective, dtype, 0, root, false), begin, end, {}};
        launch.call = {elements, 0, 0, 0, -1, int8_t(failed ? RC_SYSTEM : RC_OK), TRACE_ON_GPU, 0};
        trace->add(launch, true);
    });
}

static int report(rc_comm* comm, int calls, char* text, uint64_t bytes, std::string (RankReport::*line)() const) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("text", text);
        check_range("calls", calls, 0, FLIGHT_CALLS);
        std::string lines;
        for (int r = 0; r < entry.group().size; ++r) lines += (entry.group().report(r, calls).*line)() + "\n";
        copy_text(text, bytes, lines);
    });
}

int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return report(comm, calls, text, bytes, &RankReport::text);
}

int rc_report_json(rc_comm* comm, int calls, char* text, uint64_t bytes) {
    return report(comm, calls, text, bytes, &RankReport::json);
}

int rc_collective(rc_comm* comm, int collective, const rc_call* arguments, double timeout, rc_work** work) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("call", arguments);
        check_seconds("timeout", timeout);
        CallRecord call = called(collective, *arguments, timeout);
        check_call(call, entry.group().rank, entry.group().size);
        if (work && arguments->deferred_mismatch) reject("deferred_mismatch: expected NULL, since the call is queued");
        entry.group().prepare(call);
        if (work) {
            *work = new rc_work{comm->handle, entry->collectives.enqueue(call)};
        } else {
            reject_in_signal_handler(entry.group());
            entry->collectives.run(call);
        }
    });
}

int rc_describe(int collective, uint64_t count, int dtype, int op, double factor, int root, int with_counts, char* text,
                uint64_t bytes) {
    return guarded([&] {
        check_collective(collective);
        check_dtype(dtype);
        check_range("op", op, 0, RC_OPS - 1);
        check_pointer("text", text);
        copy_text(text, bytes, describe(signature_of(collective, dtype, op, root, with_counts), count, factor));
    });
}

int rc_check_collective(int rank, int size, int collective, const rc_call* arguments, int on_gpu) {
    return guarded([&] {
        check_pointer("call", arguments);
        check_size(size);
        check_rank("rank", rank, 0, size);
        CallRecord call = called(collective, *arguments);
        check_call(call, rank, size, on_gpu);
    });
}

namespace {

class TracedWait {
public:
    explicit TracedWait(Trace* trace) : trace_(trace), begin_(trace ? ticks() : 0) {}
    ~TracedWait() {
        if (trace_) trace_->add({TRACE_WAIT, begin_, ticks(), {}});
    }

private:
    Trace* const trace_;
    const uint64_t begin_;
};

template <class Function>
void enter_for(rc_work& work, Function function) {
    try {
        const EntryGuard entry(*work.handle);
        function(*work.work, entry.group());
    } catch (const Failure& failure) {  // of the communicator: it ends the call
        if (failure.error.code == RC_SYSTEM) throw;
    }
}

}  // namespace

int rc_work_wait(rc_work* work, double timeout, int* source) {
    return guarded([&] {
        check_pointer("work", work);
        check_seconds("timeout", timeout);
        Work& call = *work->work;
        if (!call.done()) {
            try {
                const EntryGuard entry(*work->handle);
                reject_in_signal_handler(entry.group());
                const TracedWait traced(entry.group().trace());
                call.wait(entry.group(), timeout < 0 ? UINT64_MAX : deadline_of(now_ns(), timeout));
            } catch (const Failure& failure) {
                if (work->handle->forked() || failure.error.code != RC_CLOSED) throw;
                call.wait_done();  // close() ends every call
            }
        }
        call.result();
        if (source) *source = call.message.source;
    });
}

int rc_work_done(rc_work* work) {
    if (!rc_work_ended(work)) {
        guarded([&] { enter_for(*work, [](Work& open, PeerGroup&) { open.advance(); }); });
    }
    return rc_work_ended(work);
}

int rc_work_ended(const rc_work* work) { return !work || work->work->done(); }

int rc_work_notify(rc_work* work, uint64_t token) {
    return guarded([&] {
        check_pointer("work", work);
        if (token == 0) reject("token: expected a number other than 0");
        work->work->notify(token);
        if (!work->work->done()) enter_for(*work, [](Work& open, PeerGroup&) { open.detach(); });
    });
}

int rc_work_drop(rc_work* work) {
    return guarded([&] {
        check_pointer("work", work);
        if (work->work->done() && !work->work->has_unseen_failure()) return;
        enter_for(*work, [](Work& dropped, PeerGroup& group) {
            dropped.drop(group);
            if (!dropped.done()) dropped.detach();
        });
    });
}

uint64_t rc_next_done(double timeout) { return next_done(timeout); }

void rc_work_free(rc_work* work) {
    if (!work || work->handle->forked()) return;
    rc_work_drop(work);
    delete work;
}
