// The C ABI of point-to-point messages.
#include <utility>
#include <vector>

#include "abi/handles.h"

using namespace ringcomm;

namespace {

// Returns the bytes of a transfer of the kinds from `first` to `last`.
uint64_t check(const EntryGuard& entry, const char* name, const rc_transfer* transfer, int first, int last) {
    check_pointer(name, transfer);
    check_range("kind", transfer->kind, first, last);
    check_seconds("timeout", transfer->timeout);
    check_rank("peer", transfer->peer, sends(transfer->kind) ? 0 : -1, entry.group().size);
    if (transfer->taken && transfer->kind != RC_RECV_MESSAGE) reject("taken: expected 0 for all but RC_RECV_MESSAGE");
    return checked_bytes("data", transfer->data, transfer->count, transfer->dtype);
}

void check_in_host_memory(const rc_transfer& transfer) {
    if (transfer.on_gpu) reject("on_gpu: expected 0: a message on a GPU is started");
}

void check_on_gpu(const EntryGuard& entry, const rc_transfer& transfer) {
    if (transfer.kind != RC_SEND && transfer.kind != RC_RECV && transfer.kind != RC_RECV_AT_MOST) {
        rejectf("kind: expected RC_SEND, RC_RECV or RC_RECV_AT_MOST on a GPU, got %d", transfer.kind);
    }
    reject_in_signal_handler(entry.group());
}

// The same of one of the two transfers of an exchange; an error says of which.
uint64_t check_one(const EntryGuard& entry, const char* name, const rc_transfer* transfer, int first, int last) {
    check_pointer(name, transfer);
    try {
        check_in_host_memory(*transfer);
        return check(entry, name, transfer, first, last);
    } catch (const Failure& failure) {
        rejectf("%s: %s", name, failure.what());
    }
}

// All can start, or none does.
void check_startable(rc_work* const* works, int count) {
    const auto expect = [](bool holds, int index, const char* expected) {
        if (!holds) rejectf("works[%d]: expected %s", index, expected);
    };
    for (int i = 0; i < count; ++i) {
        expect(works[i], i, "a pointer, got NULL");
        expect(works[i]->prepared, i, "a prepared transfer");
        expect(works[i]->work->done(), i, "one that is done: wait for it before its next start");
    }
    int again = count;
    for (int i = 0; i < count; ++i) {
        if (std::exchange(works[i]->listed, true)) again = i;
    }
    for (int i = 0; i < count; ++i) works[i]->listed = false;
    expect(again == count, again, "another work than before");
}

}  // namespace

int rc_transfer_run(rc_comm* comm, const rc_transfer* transfer, rc_message* message) {
    return enter(comm, [&](const EntryGuard& entry) {
        check(entry, "transfer", transfer, RC_SEND, RC_TAKE);
        check_in_host_memory(*transfer);
        const rc_message found = entry->p2p.run(*transfer);
        if (message) *message = found;
    });
}

int rc_transfer_start(rc_comm* comm, const rc_transfer* transfer, rc_work** work) {
    return enter(comm, [&](const EntryGuard& entry) {
        check(entry, "transfer", transfer, RC_SEND, RC_RECV_MESSAGE);
        check_pointer("work", work);
        if (transfer->on_gpu) check_on_gpu(entry, *transfer);
        *work = new rc_work{comm->handle, entry->p2p.start(*transfer)};
    });
}

int rc_transfer_prepare(rc_comm* comm, const rc_transfer* transfer, rc_work** work) {
    return enter(comm, [&](const EntryGuard& entry) {
        check(entry, "transfer", transfer, RC_SEND, RC_RECV_MESSAGE);
        check_in_host_memory(*transfer);
        check_pointer("work", work);
        *work = new rc_work{comm->handle, entry->p2p.prepare(*transfer), true};
    });
}

int rc_start_all(rc_work* const* works, int count, int* started) {
    return guarded([&] {
        check_pointer("works", works);
        check_range("count", count, 0, INT32_MAX);
        check_pointer("started", started);
        *started = 0;
        check_startable(works, count);
        std::vector<Work*> together;  // of one communicator
        while (*started < count) {
            together.clear();
            const auto& handle = works[*started]->handle;
            for (int i = *started; i < count && works[i]->handle == handle; ++i) {
                together.push_back(works[i]->work.get());
            }
            EntryGuard(*handle)->p2p.start_prepared(together);
            *started += int(together.size());
        }
    });
}

int rc_exchange(rc_comm* comm, const rc_transfer* sent, const rc_transfer* received, rc_message* message) {
    return enter(comm, [&](const EntryGuard& entry) {
        const uint64_t bytes = check_one(entry, "sent", sent, RC_SEND, RC_SEND_SYNCHRONOUS);
        const uint64_t target_bytes = check_one(entry, "received", received, RC_RECV, RC_RECV_MESSAGE);
        check_disjoint(sent->data, bytes, received->data, target_bytes);
        const rc_message got = entry->p2p.exchange(*sent, *received);
        if (message) *message = got;
    });
}

int rc_poll(rc_comm* comm, const rc_transfer* probe, int* found, rc_message* message) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("found", found);
        check(entry, "probe", probe, RC_PROBE, RC_TAKE);
        check_in_host_memory(*probe);
        const auto polled = entry->p2p.poll(*probe);
        *found = polled.has_value();
        if (polled && message) *message = *polled;
    });
}

int rc_announce_close(rc_comm* comm) {
    return enter(comm, [](const EntryGuard& entry) { entry->p2p.announce_close(); });
}

int rc_cancel(rc_work* work, int* cancelled) {
    return guarded([&] {
        check_pointer("work", work);
        check_pointer("cancelled", cancelled);
        if (!work->work->done()) {
            const EntryGuard entry(*work->handle);
            work->work->cancel();
        }
        *cancelled = work->work->done() && work->work->message.cancelled;
    });
}

int rc_work_message(rc_work* work, rc_message* message) {
    return guarded([&] {
        check_pointer("work", work);
        check_pointer("message", message);
        if (!work->work->done()) reject("work: expected one that is done");
        *message = work->work->message;
    });
}
