#include "started_call.h"

#include <algorithm>
#include <utility>

namespace ringcomm {

void PendingCall::release_memory() {
    CallMemory held = std::exchange(memory, {});
    PyBuffer_Release(&held.buffer);
    Py_XDECREF(held.source);
    Py_XDECREF(held.target);
}

void PendingCall::free() {
    rc_work_free(std::exchange(work, nullptr));
    release_memory();
}

void CallOwner::open(PyObject* address, PyObject* its_handle, PyObject* its_check, PyObject* type) {
    comm = static_cast<rc_comm*>(PyLong_AsVoidPtr(address));
    handle = Py_NewRef(its_handle);
    check = Py_NewRef(its_check);
    call_type = type == Py_None ? nullptr : reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    dropped = new std::vector<PendingCall>;
}

void CallOwner::close() {
    Py_DECREF(handle);  // perhaps the last reference, which ends the calls
    for (PendingCall& call : *dropped) {
        if (call.ended()) call.free();  // the memory of others is in use as long as the communicator
    }
    delete dropped;
    Py_DECREF(check);
    Py_XDECREF(reinterpret_cast<PyObject*>(call_type));
}

void CallOwner::release_ended() {
    const auto first = std::partition(dropped->begin(), dropped->end(), [](const auto& call) { return !call.ended(); });
    std::vector<PendingCall> ended(first, dropped->end());
    dropped->erase(first, dropped->end());
    for (PendingCall& call : ended) call.free();  // which may drop other calls
}

PyObject* StartedCall::end(int status) {
    PyObject* const made = status == RC_OK ? outcome(*this) : raise(owner->check, status);
    if (pending.ended()) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        pending.release_memory();
        PyErr_Restore(type, error, traceback);
    }
    return made;
}

int StartedCall::visit(visitproc visit, void* arg) {  // Py_VISIT takes these names
    Py_VISIT(Py_TYPE(&object));
    if (owner) Py_VISIT(&owner->object);
    if (!pending.ended()) return 0;  // its memory is no garbage
    Py_VISIT(result);
    Py_VISIT(pending.memory.buffer.obj);
    Py_VISIT(pending.memory.source);
    Py_VISIT(pending.memory.target);
    return 0;
}

void StartedCall::reset() {
    PendingCall call = std::exchange(pending, {});
    CallOwner* const before = std::exchange(owner, nullptr);
    PyObject* const given = std::exchange(result, nullptr);
    if (call.ended()) {
        call.free();
    } else {
        without_gil([&] { return rc_work_drop(call.work); });  // it may move data
        try {
            before->dropped->push_back(call);
        } catch (const std::bad_alloc&) {  // nobody frees it: the core may still use its memory
        }
    }
    Py_XDECREF(given);
    if (before) Py_DECREF(&before->object);
}

PyObject* given_result(StartedCall& call) { return Py_NewRef(call.result); }

PyObject* sender(StartedCall& call) {
    rc_message message;
    const int status = rc_work_message(call.pending.work, &message);
    return status == RC_OK ? PyLong_FromLong(message.source) : raise(call.owner->check, status);
}

namespace {

StartedCall& call_of(PyObject* self) { return *reinterpret_cast<StartedCall*>(self); }

// wait(timeout=None): negative is the communicator's, as None is.
PyObject* wait(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    StartedCall& call = call_of(self);
    double timeout = OWN_TIMEOUT;
    if (number > 1) return PyErr_Format(PyExc_TypeError, "wait takes at most one argument, got %zd", number);
    if (!call.check_started()) return nullptr;
    if (number && values[0] != Py_None) {
        timeout = PyFloat_AsDouble(values[0]);
        if (timeout == -1.0 && PyErr_Occurred()) return nullptr;
    }
    return call.end(call.wait(timeout));
}

// A poll may move the data of a large message.
PyObject* is_done(PyObject* self, PyObject*) {
    rc_work* const work = call_of(self).pending.work;
    return PyBool_FromLong(without_gil([work] { return rc_work_done(work); }));
}

PyObject* address(PyObject* self, void*) { return PyLong_FromVoidPtr(call_of(self).pending.work); }

PyMethodDef methods[] = {method<wait>("wait"), {"done", is_done, METH_NOARGS, nullptr}, {}};
PyGetSetDef attributes[] = {{"address", address, nullptr, nullptr, nullptr}, {}};  // of the rc_work
PyType_Slot slots[] = {
    COLLECTED_SLOTS(StartedCall),
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {},
};
PyType_Spec spec{"ringcomm._fast_path.StartedCall", sizeof(StartedCall), 0, COLLECTED, slots};

}  // namespace

int add_started_call_type(PyObject* module) {
    started_call_type = add_type(module, spec);
    return started_call_type ? 0 : -1;
}

PyObject* cancel_call(PyObject* self, PyObject*) {
    const StartedCall& call = call_of(self);
    if (!call.check_started()) return nullptr;
    int cancelled;
    const int status = without_gil([&] { return rc_cancel(call.pending.work, &cancelled); });
    return status == RC_OK ? PyBool_FromLong(cancelled) : raise(call.owner->check, status);
}

PyTypeObject* add_type(PyObject* module, PyType_Spec& spec, PyTypeObject* base) {
    PyObject* const type = PyType_FromModuleAndSpec(module, &spec, reinterpret_cast<PyObject*>(base));
    const bool added = type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0;
    Py_XDECREF(type);  // the module keeps it
    return added ? reinterpret_cast<PyTypeObject*>(type) : nullptr;
}

}  // namespace ringcomm
