// The messages of the fast path.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include <algorithm>

#include "fast_path.h"

namespace ringcomm {

namespace {

constexpr uint64_t ON_GPU = UINT64_MAX;  // bytes: to wait for a stream takes long

// What a receive returns.
PyObject* source_of(const rc_message& message) { return PyLong_FromLong(message.source); }

// The same as run() for a call that tells what it has received, from which `result` is made.
template <class Call, class Result>
PyObject* run_for(const FastPath& fast_path, uint64_t bytes, Result result, Call call) {
    rc_message message;
    PyObject* const done = run(fast_path, Py_NewRef(Py_None), bytes, [&] { return call(message); });
    if (done != Py_None) return done;
    Py_DECREF(done);
    return result(message);
}

// Fills in the current stream of a message on a GPU. Returns the stream, an owned reference; nullptr: the exception is
// set.
PyObject* read_stream(FastPath& fast_path, const Array& x, rc_transfer& transfer) {
    return current_stream(GpuArrays::current(x), fast_path.message_gpus.ordinal, transfer.stream);
}

// Sends or receives an array on a GPU, and returns the source; with `async_op`, a message to be started.
PyObject* message(FastPath& fast_path, const Array& x, rc_transfer& transfer, PyObject* async_op) {
    if (!PyBool_Check(async_op)) return not_plain();
    PyObject* const stream = read_stream(fast_path, x, transfer);
    if (!stream) return nullptr;
    if (async_op == Py_True) {
        const MessageOwner owner{
            fast_path.comm, fast_path.handle, fast_path.check, GpuArrays::current(x), fast_path.message_gpus.ordinal,
            false};
        return make_gpu_message(fast_path.message_type, owner, transfer, stream);
    }
    PyObject* const from = run_for(fast_path, ON_GPU, source_of, [&](rc_message& message) {
        return launch_message(fast_path.comm, transfer, message);
    });
    Py_DECREF(stream);
    return from;
}

template <class Result>
PyObject* exchange(const FastPath& fast_path, const Array& x, rc_transfer& sent, const Array& out,
                   rc_transfer& received, Result result) {
    x.fill(sent);
    out.fill(received);
    return run_for(fast_path, std::max(x.bytes(), out.bytes()), result,
                   [&](rc_message& message) { return rc_exchange(fast_path.comm, &sent, &received, &message); });
}

PyObject* exchange_on_gpu(FastPath& fast_path, const Array& x, rc_transfer& sent, const Array& out,
                          rc_transfer& received) {
    x.fill(sent);
    out.fill(received);
    PyObject* const first = read_stream(fast_path, out, received);
    PyObject* const second = first ? read_stream(fast_path, x, sent) : nullptr;
    PyObject* result = nullptr;
    if (second) {
        rc_work* receive = nullptr;
        result = run_for(fast_path, ON_GPU, source_of, [&](rc_message& message) {
            const int status = rc_transfer_start(fast_path.comm, &received, &receive);
            return status == RC_OK ? launch_message(fast_path.comm, sent, message) : status;
        });
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);  // the first error is raised, but no memory may be in use then
        if (receive) {
            Py_XDECREF(result);
            result = run_for(fast_path, ON_GPU, source_of,
                             [&](rc_message& message) { return end_message(receive, received.stream, message); });
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

}  // namespace

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *array, *async_op;
    rc_transfer sent = transfer_of(RC_SEND);
    if (!given.array(array) || !given.rank(sent.peer) || !given.tag(sent.tag) || !given.nothing_but(async_op)) {
        return not_plain();
    }
    Array x;
    if (!fast_path.read_message(array, x, false)) return not_plain();
    x.fill(sent);
    if (x.on_gpu) {
        PyObject* const done = message(fast_path, x, sent, async_op);
        if (!done || async_op != Py_False) return done;
        Py_DECREF(done);
        Py_RETURN_NONE;
    }
    return run_or_start(fast_path, async_op, array, Py_NewRef(Py_None), x.bytes(), [&](rc_work** work) {
        return work ? rc_transfer_start(fast_path.comm, &sent, work) : rc_transfer_run(fast_path.comm, &sent, nullptr);
    });
}

PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *array, *async_op;
    rc_transfer received = transfer_of(RC_RECV);
    bool at_most;
    if (number != 6 || !given.array(array) || !given.source(received.peer) || !given.tag(received.tag) ||
        !given.flag(at_most) || !given.nothing_but(async_op)) {
        return not_plain();
    }
    if (at_most) received.kind = RC_RECV_AT_MOST;
    Array x;
    if (!fast_path.read_message(array, x, true)) return not_plain();
    x.fill(received);
    if (x.on_gpu) return message(fast_path, x, received, async_op);
    if (async_op == Py_False) {
        return run_for(fast_path, x.bytes(), source_of,
                       [&](rc_message& message) { return rc_transfer_run(fast_path.comm, &received, &message); });
    }
    const auto start = [&](rc_work** work) { return rc_transfer_start(fast_path.comm, &received, work); };
    return run_or_start(fast_path, async_op, array, Py_NewRef(Py_None), x.bytes(), start, sender);
}

PyObject* recv_message(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    rc_transfer received = transfer_of(RC_RECV_MESSAGE);
    if (!given.array(array) || !given.source_or_any(received.peer) || !given.tag(received.tag)) return not_plain();
    Array x;
    if (!fast_path.arrays.read(array, x, true)) return not_plain();
    x.fill(received);
    return run_for(fast_path, x.bytes(), fields_of,
                   [&](rc_message& message) { return rc_transfer_run(fast_path.comm, &received, &message); });
}

PyObject* sendrecv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *array, *target;
    rc_transfer sent = transfer_of(RC_SEND), received = transfer_of(RC_RECV);
    if (!given.array(array) || !given.rank(sent.peer) || !given.array(target) || !given.source(received.peer) ||
        !given.tag(sent.tag) || !given.nothing_else()) {
        return not_plain();
    }
    received.tag = sent.tag;
    Array x, out;
    if (!fast_path.read_message(array, x, false) || !fast_path.read_message(target, out, true)) return not_plain();
    if (x.on_gpu && out.on_gpu) return exchange_on_gpu(fast_path, x, sent, out, received);
    return x.on_gpu || out.on_gpu ? not_plain() : exchange(fast_path, x, sent, out, received, source_of);
}

// Between arrays in host memory, of any dtypes, each with a tag of its own.
PyObject* sendrecv_message(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *array, *target;
    rc_transfer sent = transfer_of(RC_SEND), received = transfer_of(RC_RECV_MESSAGE);
    if (!given.array(array) || !given.rank(sent.peer) || !given.tag(sent.tag) || !given.array(target) ||
        !given.source_or_any(received.peer) || !given.tag(received.tag)) {
        return not_plain();
    }
    Array x, out;
    if (!fast_path.arrays.read(array, x, false) || !fast_path.arrays.read(target, out, true)) return not_plain();
    return exchange(fast_path, x, sent, out, received, fields_of);
}

}  // namespace ringcomm
