// The C ABI of every communicator: its failures, its end, and what its calls have left to raise.
#include "abi/handles.h"

using namespace ringcomm;

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
