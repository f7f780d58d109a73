// The C ABI of point-to-point messages.
#include <vector>

#include "abi/handles.h"

using namespace ringcomm;

namespace {

Transfer outgoing(TransferKind kind, const void* data, uint64_t count, int dtype, int peer, int64_t tag,
                  double timeout) {
    // A send never writes through the pointer.
    return {kind, static_cast<std::byte*>(const_cast<void*>(data)), count, dtype, peer, tag, timeout};
}

Transfer incoming(TransferKind kind, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
                  uint64_t taken = 0) {
    return {kind, static_cast<std::byte*>(data), count, dtype, peer, tag, timeout, taken};
}

void check(const EntryGuard& entry, const Transfer& transfer) {
    checked_bytes("data", transfer.data, transfer.count, transfer.dtype);
    check_seconds("timeout", transfer.timeout);
    check_rank("peer", transfer.peer, sends(transfer.kind) ? 0 : -1, entry.group().size);
}

// Starts the transfer if `work`, else runs it.
int transfer(rc_comm* comm, const Transfer& transfer, rc_message* message, rc_work** work) {
    return enter(comm, [&](const EntryGuard& entry) {
        check(entry, transfer);
        if (work) {
            *work = new rc_work{comm->handle, entry->p2p.start(transfer)};
        } else {
            const rc_message received = entry->p2p.run(transfer);
            if (message) *message = received;
        }
    });
}

int prepare(rc_comm* comm, const Transfer& transfer, rc_work** work) {
    return enter(comm, [&](const EntryGuard& entry) {
        check(entry, transfer);
        check_pointer("work", work);
        *work = new rc_work{comm->handle, entry->p2p.prepare(transfer), true};
    });
}

void check_startable(const rc_work* work) {
    check_pointer("work", work);
    if (!work->prepared) reject("work: expected a prepared transfer");
    if (!work->work->done()) reject("work: expected one that is done: wait for it before its next start");
}

int receive(rc_comm* comm, const Transfer& received, int* source, rc_work** work) {
    rc_message message = NO_MESSAGE;
    const int status = transfer(comm, received, &message, work);
    if (status == RC_OK && !work && source) *source = message.source;
    return status;
}

int exchange(rc_comm* comm, const Transfer& sent, const Transfer& received, rc_message* message) {
    return enter(comm, [&](const EntryGuard& entry) {
        const uint64_t bytes = checked_bytes("data", sent.data, sent.count, sent.dtype);
        const uint64_t target_bytes = checked_bytes("target", received.data, received.count, received.dtype);
        check_rank("dest", sent.peer, 0, entry.group().size);
        check_rank("source", received.peer, -1, entry.group().size);
        check_seconds("timeout", sent.timeout);
        check_disjoint(sent.data, bytes, received.data, target_bytes);
        const rc_message got = entry->p2p.exchange(sent, received);
        if (message) *message = got;
    });
}

}  // namespace

int rc_send(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
            rc_work** work) {
    return transfer(comm, outgoing(TransferKind::SEND, data, count, dtype, peer, tag, timeout), nullptr, work);
}

int rc_send_synchronous(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag,
                        double timeout, rc_work** work) {
    const Transfer sent = outgoing(TransferKind::SYNCHRONOUS_SEND, data, count, dtype, peer, tag, timeout);
    return transfer(comm, sent, nullptr, work);
}

int rc_recv(rc_comm* comm, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout, int* source,
            rc_work** work) {
    return receive(comm, incoming(TransferKind::RECV, data, count, dtype, peer, tag, timeout), source, work);
}

int rc_recv_at_most(rc_comm* comm, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
                    int* source, rc_work** work) {
    return receive(comm, incoming(TransferKind::RECV_AT_MOST, data, count, dtype, peer, tag, timeout), source, work);
}

int rc_recv_message(rc_comm* comm, void* data, uint64_t bytes, int peer, int64_t tag, uint64_t taken, double timeout,
                    rc_message* message, rc_work** work) {
    const TransferKind kind = TransferKind::RECV_MESSAGE;
    return transfer(comm, incoming(kind, data, bytes, RC_UINT8, peer, tag, timeout, taken), message, work);
}

int rc_sendrecv(rc_comm* comm, const void* data, uint64_t count, int dtype, int dest, void* target,
                uint64_t target_count, int target_dtype, int source, int64_t tag, double timeout, int* from) {
    rc_message message;
    const int status =
        exchange(comm, outgoing(TransferKind::SEND, data, count, dtype, dest, tag, timeout),
                 incoming(TransferKind::RECV, target, target_count, target_dtype, source, tag, timeout), &message);
    if (status == RC_OK && from) *from = message.source;
    return status;
}

int rc_sendrecv_message(rc_comm* comm, const void* data, uint64_t bytes, int dest, int64_t send_tag, void* target,
                        uint64_t target_bytes, int source, int64_t recv_tag, double timeout, rc_message* message) {
    return exchange(comm, outgoing(TransferKind::SEND, data, bytes, RC_UINT8, dest, send_tag, timeout),
                    incoming(TransferKind::RECV_MESSAGE, target, target_bytes, RC_UINT8, source, recv_tag, timeout),
                    message);
}

int rc_probe(rc_comm* comm, int peer, int64_t tag, int waits, double timeout, int* found, rc_message* message,
             uint64_t* taken) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("found", found);
        const TransferKind kind = taken ? TransferKind::TAKE : TransferKind::PROBE;
        const Transfer probe = incoming(kind, nullptr, 0, RC_UINT8, peer, tag, timeout);
        check(entry, probe);
        const auto probed = entry->p2p.probe(probe, waits);
        *found = probed.has_value();
        if (!probed) return;
        if (message) *message = probed->message;
        if (taken) *taken = probed->taken;
    });
}

int rc_recv_or_take(rc_comm* comm, void* data, uint64_t bytes, int peer, int64_t tag, double timeout,
                    rc_message* message, uint64_t* taken) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("message", message);
        check_pointer("taken", taken);
        const Transfer received = incoming(TransferKind::RECV_OR_TAKE, data, bytes, RC_UINT8, peer, tag, timeout);
        check(entry, received);
        const ProbedMessage found = entry->p2p.receive_or_take(received);
        *message = found.message;
        *taken = found.taken;
    });
}

int rc_prepare_send(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag, int synchronous,
                    rc_work** work) {
    const TransferKind kind = synchronous ? TransferKind::SYNCHRONOUS_SEND : TransferKind::SEND;
    return prepare(comm, outgoing(kind, data, count, dtype, peer, tag, -1), work);
}

int rc_prepare_receive(rc_comm* comm, void* data, uint64_t bytes, int peer, int64_t tag, rc_work** work) {
    return prepare(comm, incoming(TransferKind::RECV_MESSAGE, data, bytes, RC_UINT8, peer, tag, -1), work);
}

int rc_start_all(rc_work* const* works, int count, int* started) {
    return guarded([&] {
        check_pointer("works", works);
        check_range("count", count, 0, INT32_MAX);
        check_pointer("started", started);
        *started = 0;
        std::vector<Work*> together;  // of one communicator
        while (*started < count) {
            together.clear();
            check_startable(works[*started]);
            const auto& handle = works[*started]->handle;
            for (int i = *started; i < count; ++i) {
                check_startable(works[i]);
                if (works[i]->handle != handle) break;
                together.push_back(works[i]->work.get());
            }
            EntryGuard(*handle)->p2p.start_prepared(together);
            *started += int(together.size());
        }
    });
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
