// The requests of ringcomm.mpi4py: transfers of plain arrays, and waiting for several requests at once. What is not
// plain takes the general way, in ringcomm/mpi4py: statuses, failures, and operations that make more than one call of
// the core.
#pragma once
#include "fast_path.h"

namespace ringcomm {

// The Python objects.

// The base of requests: `_object` in Python.
struct RequestHandle {
    PyObject object;
    PyObject* named;  // nullptr: the request is null
};

// An operation that a request names.
struct StartedOperation {
    StartedCall call;
    PyObject* context;  // of the communicator, whose error handler hears of failures; nullptr after tp_clear
};

enum class PlainKind { SEND, SYNCHRONOUS_SEND, RECEIVE };

struct PlainTransfer {
    PlainKind kind;
    Array array;
    int peer;
    int64_t tag;

    int start(rc_comm* comm, rc_work** work) const {
        if (kind == PlainKind::RECEIVE) {
            const uint64_t bytes = array.count * uint64_t(rc_dtype_bytes(array.dtype));
            return rc_recv_message(comm, array.data, bytes, peer, tag, 0, OWN_TIMEOUT, nullptr, work);
        }
        auto* const send = kind == PlainKind::SEND ? rc_send : rc_send_synchronous;
        return send(comm, array.data, array.count, array.dtype, peer, tag, OWN_TIMEOUT, work);
    }
};

// Starts the transfers of a communicator.
struct RequestStarts {
    PyObject object;
    FastPath* fast_path;
    PyTypeObject *operation, *request;  // subclasses of StartedOperation and RequestHandle in Python
};

// An operation that can be started again and again. It is garbage-collected, as the operation is.
struct PersistentOperation {
    PyObject object;
    PyObject* started;        // the operation while it is active, else None or nullptr
    RequestStarts* requests;  // nullptr: the transfer is not plain
    PyObject *context, *array;
    PlainTransfer transfer;

    bool active() const { return started && started != Py_None; }
};

inline bool is_a(PyObject* object, PyTypeObject* type) { return PyObject_TypeCheck(object, type); }

// requests.cpp
extern PyTypeObject *request_type, *operation_type, *persistent_type;
// Makes the operation of a transfer that is to be started. nullptr: the exception is set.
StartedOperation* make_operation(const RequestStarts& requests, PyObject* context, const PlainTransfer& transfer,
                                 PyObject* array);

// request_sets.cpp: functions of the module, which take a list or tuple of requests.
PyObject* wait_all(PyObject*, PyObject* requests);
PyObject* test_all(PyObject*, PyObject* requests);
PyObject* find_done(PyObject*, PyObject* requests);
PyObject* start_all(PyObject*, PyObject* requests);

}  // namespace ringcomm
