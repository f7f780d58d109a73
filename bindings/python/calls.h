// How the modules for Python call the core.
#pragma once
#include <Python.h>

#include <new>

#include "gil.h"
#include "ringcomm.h"

namespace ringcomm {

constexpr double OWN_TIMEOUT = -1.0;  // the communicator's

// A function that Python calls: no exception may leave it. The functions of the core throw none, so what is left is
// that memory is short.
template <auto function, class... Given>
PyObject* entry(Given... given) {
    try {
        return function(given...);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

// Methods of any number of arguments, of none, and of one.
template <auto function>
PyMethodDef method(const char* name) {
    const auto called = entry<function, PyObject*, PyObject* const*, Py_ssize_t>;
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL, nullptr};
}
template <auto function>
PyMethodDef method_of_none(const char* name) {
    return {name, entry<function, PyObject*, PyObject*>, METH_NOARGS, nullptr};
}
template <auto function>
PyMethodDef method_of_one(const char* name) {
    return {name, entry<function, PyObject*, PyObject*>, METH_O, nullptr};
}
template <class Function>
PyType_Slot slot(int which, Function* function) {
    return {which, reinterpret_cast<void*>(function)};
}
template <auto create>
PyType_Slot constructor() {
    return slot(Py_tp_new, entry<create, PyTypeObject*, PyObject*, PyObject*>);
}

// Sets the exception of a status that is not RC_OK, by the Python function `check`. Must follow the call.
inline PyObject* raise(PyObject* check, int status) {
    Py_XDECREF(PyObject_CallFunction(check, "i", status));
    return nullptr;
}

// A transfer of no memory yet, with the timeout of the communicator.
inline rc_transfer transfer_of(int kind, int peer = -1, int64_t tag = 0) {
    return {kind, nullptr, 0, RC_UINT8, peer, tag, OWN_TIMEOUT, 0, 0, 0, nullptr};
}
inline void set_bytes(rc_transfer& transfer, void* data, uint64_t bytes) {
    transfer.data = data;
    transfer.count = bytes;
}

// Receives a message of any length. Returns its bytes, an owned reference; nullptr: the exception is set. Where memory
// is short, the message is lost, but its sender goes on.
inline PyObject* receive_bytes(rc_comm* comm, PyObject* check, int peer, int64_t tag, rc_message& message) {
    char few[4096];  // of most objects
    rc_transfer receive = transfer_of(RC_RECV_OR_TAKE, peer, tag);
    set_bytes(receive, few, sizeof few);
    int status = run_core(sizeof few, [&] { return rc_transfer_run(comm, &receive, &message); });
    if (status != RC_OK) return raise(check, status);
    if (!message.taken) return PyBytes_FromStringAndSize(few, Py_ssize_t(message.bytes));
    PyObject* const bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(message.bytes));
    receive = transfer_of(RC_RECV_MESSAGE, message.source, message.tag);
    receive.taken = message.taken;
    if (bytes) set_bytes(receive, PyBytes_AsString(bytes), message.bytes);
    status = without_gil([&] { return rc_transfer_run(comm, &receive, &message); });
    if (!bytes || status == RC_OK) return bytes;
    Py_DECREF(bytes);
    return raise(check, status);
}

// Allocates an object of a heap type, all zero.
template <class Object>
Object* allocate(PyTypeObject* type) {
    auto* const alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return reinterpret_cast<Object*>(alloc(type, 0));
}

inline void release(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

}  // namespace ringcomm
