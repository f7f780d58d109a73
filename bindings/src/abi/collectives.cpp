// The C ABI of collectives.
#include "abi/handles.h"
#include "core/signature.h"

using namespace ringcomm;

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
