// How the modules for Python call the core.
#pragma once
#include <Python.h>

#include "ringcomm.h"

namespace ringcomm {

using Method = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef method(const char* name, Method function) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

// Returns the status of a call of the core, which runs without the GIL.
template <class Call>
int without_gil(Call call) {
    PyThreadState* const thread = PyEval_SaveThread();
    const int status = call();
    PyEval_RestoreThread(thread);
    return status;
}

// Sets the exception of a status that is not RC_OK, by the Python function `check`. Must follow the call.
inline PyObject* raise(PyObject* check, int status) {
    Py_XDECREF(PyObject_CallFunction(check, "i", status));
    return nullptr;
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
