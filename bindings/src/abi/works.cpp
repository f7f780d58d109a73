// The C ABI of works: calls that were started.
#include "abi/handles.h"

using namespace ringcomm;

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
