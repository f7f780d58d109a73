// GpuMessage: a send or receive of an array on a GPU that Python waits for.
#include "gpu_message.h"

#include <structmember.h>

#include <utility>

#include "started_call.h"

namespace ringcomm {

namespace {

// The Python object.
struct GpuMessage {
    PyObject object;
    MessageOwner owner;
    rc_transfer call;
    PyObject* stream;  // of the call: it must not be destroyed while the message uses it
    rc_work* work;     // once it is started
    bool may_release;  // the stream of the call has waited: the array may be used again there
};

GpuMessage& message_of(PyObject* self) { return *reinterpret_cast<GpuMessage*>(self); }

bool read_timeout(PyObject* given, double& timeout) {
    timeout = PyFloat_AsDouble(given);
    return timeout != -1.0 || !PyErr_Occurred();
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    MessageOwner owner{};
    rc_transfer call = transfer_of(RC_SEND);
    PyObject *comm, *data;
    int blocking;
    unsigned long long count;
    long long tag;
    if (!PyArg_ParseTuple(arguments, "O!OOOipiO!KiiLd", &PyLong_Type, &comm, &owner.handle, &owner.check,
                          &owner.current, &owner.ordinal, &blocking, &call.kind, &PyLong_Type, &data, &count,
                          &call.dtype, &call.peer, &tag, &call.timeout)) {
        return nullptr;
    }
    owner.comm = static_cast<rc_comm*>(PyLong_AsVoidPtr(comm));
    call.data = PyLong_AsVoidPtr(data);
    owner.blocking = blocking;
    call.count = count;
    call.tag = tag;
    call.on_gpu = 1;
    PyObject* const stream = current_stream(owner.current, owner.ordinal, call.stream);
    return stream ? make_gpu_message(type, owner, call, stream) : nullptr;
}

void destroy(PyObject* self) {
    const GpuMessage& message = message_of(self);
    rc_work_free(message.work);
    for (PyObject* held : {message.owner.handle, message.owner.check, message.owner.current, message.stream})
        Py_XDECREF(held);
    release(self);
}

// start(async_op): returns the message itself.
PyObject* start(PyObject* self, PyObject* async_op) {
    GpuMessage& message = message_of(self);
    rc_work* work = nullptr;
    message.call.async = async_op == Py_True;
    const int status = without_gil([&] { return rc_transfer_start(message.owner.comm, &message.call, &work); });
    message.work = work;
    return status == RC_OK ? Py_NewRef(self) : raise(message.owner.check, status);
}

// wait(timeout): until the message is matched, and lets the current stream wait for its end.
PyObject* wait(PyObject* self, PyObject* given) {
    GpuMessage& message = message_of(self);
    double timeout;
    void* current = nullptr;
    if (!read_timeout(given, timeout)) return nullptr;
    PyObject* const stream = current_stream(message.owner.current, message.owner.ordinal, current);
    if (!stream) return nullptr;
    int source = -1;
    const int status = without_gil([&] {
        if (message.owner.blocking) return rc_work_wait(message.work, timeout, &source);
        return rc_work_wait_launched(message.work, timeout, current, &source);
    });
    Py_DECREF(stream);
    if (status != RC_OK) return raise(message.owner.check, status);
    message.may_release = current == message.call.stream && !message.owner.blocking;
    return PyLong_FromLong(source);
}

// finish(timeout): waits until the message has moved.
PyObject* finish(PyObject* self, PyObject* given) {
    const GpuMessage& message = message_of(self);
    double timeout;
    if (!read_timeout(given, timeout)) return nullptr;
    const int status = without_gil([&] { return rc_work_wait(message.work, timeout, nullptr); });
    return status == RC_OK ? Py_NewRef(Py_None) : raise(message.owner.check, status);
}

// result(source): of the communicator's call.
PyObject* result(PyObject* self, PyObject* source) {
    return Py_NewRef(message_of(self).call.kind == RC_SEND ? Py_None : source);
}

PyObject* is_done(PyObject* self, PyObject*) { return PyBool_FromLong(rc_work_done(message_of(self).work)); }

// Whether wait() does not make the caller wait: the message is launched.
PyObject* on_stream(PyObject* self, void*) {
    const GpuMessage& message = message_of(self);
    int launched;
    const int status = rc_work_launched(message.work, &launched);
    return status == RC_OK ? PyBool_FromLong(launched && !message.owner.blocking) : raise(message.owner.check, status);
}

PyObject* may_release(PyObject* self, void*) { return PyBool_FromLong(message_of(self).may_release); }
PyObject* address(PyObject* self, void*) { return PyLong_FromVoidPtr(message_of(self).work); }

PyMethodDef methods[] = {
    {"start", start, METH_O, nullptr},   {"wait", wait, METH_O, nullptr},         {"finish", finish, METH_O, nullptr},
    {"result", result, METH_O, nullptr}, {"done", is_done, METH_NOARGS, nullptr}, {},
};
PyGetSetDef attributes[] = {
    {"on_stream", on_stream, nullptr, nullptr, nullptr},
    {"may_release", may_release, nullptr, nullptr, nullptr},
    {"address", address, nullptr, nullptr, nullptr},
    {},
};
PyType_Slot slots[] = {
    slot(Py_tp_new, create), slot(Py_tp_dealloc, destroy), {Py_tp_methods, methods}, {Py_tp_getset, attributes}, {},
};
PyType_Spec spec{"ringcomm._fast_path.GpuMessage", sizeof(GpuMessage), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE, slots};

}  // namespace

int add_gpu_message_type(PyObject* module) { return add_type(module, spec) ? 0 : -1; }

PyObject* make_gpu_message(PyTypeObject* type, const MessageOwner& owner, const rc_transfer& call, PyObject* stream) {
    auto* const message = allocate<GpuMessage>(type);
    if (!message) {
        Py_DECREF(stream);
        return nullptr;
    }
    message->owner = owner;
    for (PyObject* held : {owner.handle, owner.check, owner.current}) Py_INCREF(held);
    message->call = call;
    message->stream = stream;
    return &message->object;
}

PyObject* current_stream(PyObject* current, int ordinal, void*& stream) {
    static PyObject* const name = PyUnicode_InternFromString("ptr");
    PyObject* const number = PyLong_FromLong(ordinal);
    PyObject* const found = number ? PyObject_CallFunctionObjArgs(current, number, nullptr) : nullptr;
    Py_XDECREF(number);
    if (!found) return nullptr;
    PyObject* const address = PyLong_CheckExact(found) ? Py_NewRef(found) : PyObject_GetAttr(found, name);
    stream = address ? reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(address)) : nullptr;
    Py_XDECREF(address);
    if (address && !PyErr_Occurred()) return found;
    Py_DECREF(found);
    return nullptr;
}

}  // namespace ringcomm
