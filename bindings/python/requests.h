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

    int visit(visitproc visit, void* arg) {  // Py_VISIT takes these names
        Py_VISIT(Py_TYPE(&object));
        Py_VISIT(named);
        return 0;
    }
    void reset() { Py_CLEAR(named); }
};

// An operation that a request names.
struct PendingOperation {
    StartedCall call;
    PyObject* context;  // of the communicator, whose error handler hears of failures; nullptr after tp_clear
    bool completed, cancelled, watched;  // by Python: see ringcomm/mpi4py/requests/operations.py

    int visit(visitproc visit, void* arg) {
        Py_VISIT(context);
        return call.visit(visit, arg);
    }
    void reset() {
        call.reset();
        Py_CLEAR(context);
    }
};

// Makes the requests of a communicator, and starts their transfers.
struct RequestMaker {
    PyObject object;
    FastPath* fast_path;
    PyTypeObject *operation, *request;  // subclasses of PendingOperation and RequestHandle in Python
};

// An operation that can be started again and again. One of a plain array has a prepared work.
struct PersistentOperation {
    PendingOperation operation;
    bool active;
    uint64_t bytes;
    PyObject* array;  // nullptr: the transfer is not plain

    int visit(visitproc visit, void* arg) {
        Py_VISIT(array);
        return operation.visit(visit, arg);
    }
    void reset() {
        operation.reset();
        Py_CLEAR(array);
    }
};

inline bool is_a(PyObject* object, PyTypeObject* type) { return PyObject_TypeCheck(object, type); }

// requests.cpp
int add_request_types(PyObject* module);
extern PyTypeObject *request_type, *operation_type, *persistent_type;
// request_sets.cpp: the functions of the module that take a list or tuple of requests, and the method of a
// persistent operation that is not active: starts it, and returns whether it is plain.
PyObject* wait_all(PyObject*, PyObject* requests);
PyObject* test_all(PyObject*, PyObject* requests);
PyObject* find_done(PyObject*, PyObject* requests);
PyObject* start_all(PyObject*, PyObject* requests);
PyObject* start_prepared(PyObject* self, PyObject*);

}  // namespace ringcomm
