// The messages of the fast path.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include "fast_path.h"

#include <algorithm>

namespace ringcomm {

namespace {

constexpr uint64_t ON_GPU = UINT64_MAX;  // bytes: to wait for a stream takes long

// Makes the call of a message on a GPU. Returns the stream, an owned reference; nullptr: the exception is set.
PyObject* prepare(FastPath& fast_path, int kind, const Array& x, int peer, int64_t tag, MessageCall& call) {
    call = {kind, x.data, x.count, x.dtype, peer, tag, OWN_TIMEOUT, nullptr};
    return current_stream(GpuArrays::current(x), fast_path.message_gpus.ordinal, call.stream);
}

// Sends or receives an array on a GPU, and returns the source; with `async_op`, a message to be started.
PyObject* message(FastPath& fast_path, int kind, const Array& x, int peer, int64_t tag, PyObject* async_op) {
    if (!PyBool_Check(async_op)) return not_plain();
    MessageCall call;
    PyObject* const stream = prepare(fast_path, kind, x, peer, tag, call);
    if (!stream) return nullptr;
    if (async_op == Py_True) {
        const MessageOwner owner{
            fast_path.comm, fast_path.handle, fast_path.check, GpuArrays::current(x), fast_path.message_gpus.ordinal,
            false};
        return make_gpu_message(fast_path.message_type, owner, call, stream);
    }
    PyObject* const from =
        run_for_source(fast_path, ON_GPU, [&](int& source) { return call.run(fast_path.comm, source); });
    Py_DECREF(stream);
    return from;
}

PyObject* exchange(FastPath& fast_path, const Array& x, int dest, const Array& out, int source, int64_t tag) {
    MessageCall sent, received;
    PyObject* const first = prepare(fast_path, RC_GPU_RECV, out, source, tag, received);
    PyObject* const second = first ? prepare(fast_path, RC_GPU_SEND, x, dest, tag, sent) : nullptr;
    PyObject* result = nullptr;
    if (second) {
        rc_work* receive = nullptr;
        result = run(fast_path, Py_NewRef(Py_None), ON_GPU, [&] {
            const int status = received.start(fast_path.comm, false, receive);
            return status == RC_OK ? sent.run(fast_path.comm, dest) : status;
        });
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);  // the first error is raised, but no memory may be in use then
        if (receive) {
            Py_XDECREF(result);
            result = run_for_source(fast_path, ON_GPU, [&](int& from) { return received.end(receive, from); });
        }
        if (type) {
            Py_XDECREF(std::exchange(result, nullptr));
            PyErr_Restore(type, error, traceback);
        }
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

// The same as run() for a call that tells the message that it has received: the fields of an Envelope.
template <class Call>
PyObject* run_for_message(const FastPath& fast_path, uint64_t bytes, Call call) {
    rc_message message;
    PyObject* const done = run(fast_path, Py_NewRef(Py_None), bytes, [&] { return call(&message); });
    if (done != Py_None) return done;
    Py_DECREF(done);
    return fields_of(message);
}

}  // namespace

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    PyObject* async_op;
    if (!given.array(array) || !given.rank(peer) || !given.tag(tag) || !given.nothing_but(async_op)) return not_plain();
    Array x;
    if (!fast_path.read_message(array, x, false)) return not_plain();
    if (x.on_gpu) {
        PyObject* const done = message(fast_path, RC_GPU_SEND, x, peer, tag, async_op);
        if (!done || async_op != Py_False) return done;
        Py_DECREF(done);
        Py_RETURN_NONE;
    }
    return run_or_start(fast_path, async_op, array, Py_NewRef(Py_None), x.bytes(), [&](rc_work** work) {
        return rc_send(fast_path.comm, x.data, x.count, x.dtype, peer, tag, OWN_TIMEOUT, work);
    });
}

PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    bool at_most;
    PyObject* async_op;
    if (number != 6 || !given.array(array) || !given.source(peer) || !given.tag(tag) || !given.flag(at_most) ||
        !given.nothing_but(async_op)) {
        return not_plain();
    }
    Array x;
    if (!fast_path.read_message(array, x, true)) return not_plain();
    if (x.on_gpu) return message(fast_path, at_most ? RC_GPU_RECV_AT_MOST : RC_GPU_RECV, x, peer, tag, async_op);
    auto* const receive = at_most ? rc_recv_at_most : rc_recv;
    if (async_op == Py_False) {
        return run_for_source(fast_path, x.bytes(), [&](int& from) {
            return receive(fast_path.comm, x.data, x.count, x.dtype, peer, tag, OWN_TIMEOUT, &from, nullptr);
        });
    }
    const auto start = [&](rc_work** work) {
        return receive(fast_path.comm, x.data, x.count, x.dtype, peer, tag, OWN_TIMEOUT, nullptr, work);
    };
    return run_or_start(fast_path, async_op, array, Py_NewRef(Py_None), x.bytes(), start, sender);
}

PyObject* recv_message(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    if (!given.array(array) || !given.source_or_any(peer) || !given.tag(tag)) return not_plain();
    Array x;
    if (!fast_path.arrays.read(array, x, true)) return not_plain();
    return run_for_message(fast_path, x.bytes(), [&](rc_message* message) {
        return rc_recv_message(fast_path.comm, x.data, x.bytes(), peer, tag, 0, OWN_TIMEOUT, message, nullptr);
    });
}

PyObject* sendrecv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *sent, *received;
    int dest, source;
    int64_t tag;
    if (!given.array(sent) || !given.rank(dest) || !given.array(received) || !given.source(source) || !given.tag(tag) ||
        !given.nothing_else()) {
        return not_plain();
    }
    Array x, out;
    if (!fast_path.read_message(sent, x, false) || !fast_path.read_message(received, out, true)) return not_plain();
    if (x.on_gpu && out.on_gpu) return exchange(fast_path, x, dest, out, source, tag);
    if (x.on_gpu || out.on_gpu) return not_plain();
    return run_for_source(fast_path, std::max(x.bytes(), out.bytes()), [&](int& from) {
        return rc_sendrecv(fast_path.comm, x.data, x.count, x.dtype, dest, out.data, out.count, out.dtype, source, tag,
                           OWN_TIMEOUT, &from);
    });
}

// Between arrays in host memory, as bytes, each with a tag of its own.
PyObject* sendrecv_message(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *sent, *received;
    int dest, source;
    int64_t send_tag, recv_tag;
    if (!given.array(sent) || !given.rank(dest) || !given.tag(send_tag) || !given.array(received) ||
        !given.source_or_any(source) || !given.tag(recv_tag)) {
        return not_plain();
    }
    Array x, out;
    if (!fast_path.arrays.read(sent, x, false) || !fast_path.arrays.read(received, out, true)) return not_plain();
    return run_for_message(fast_path, std::max(x.bytes(), out.bytes()), [&](rc_message* message) {
        return rc_sendrecv_message(fast_path.comm, x.data, x.bytes(), dest, send_tag, out.data, out.bytes(), source,
                                   recv_tag, OWN_TIMEOUT, message);
    });
}

}  // namespace ringcomm
