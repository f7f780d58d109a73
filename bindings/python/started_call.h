// StartedCall: a call of the core that was started and may still run, as Python holds it. MessageWork is a subclass.
#pragma once
#include <Python.h>

#include <vector>

#include "calls.h"
#include "ringcomm.h"

namespace ringcomm {

// What a call uses until it is done. All zero: nothing.
struct CallMemory {
    Py_buffer buffer;
    PyObject *source, *target;  // arrays; each may be nullptr
};

// A call of the core, and the memory that it uses. All zero: none.
struct PendingCall {
    rc_work* work;
    CallMemory memory;

    bool ended() const { return rc_work_ended(work); }
    // These may run Python code.
    void release_memory();
    void free();
};

// The base of the objects that start calls on a communicator. They live as long as these calls.
struct CallOwner {
    PyObject object;
    rc_comm* comm;
    PyObject* handle;                   // keeps comm alive
    PyObject* check;                    // raises the error behind a status
    PyTypeObject* call_type;            // a StartedCall; nullptr: it makes none by itself
    std::vector<PendingCall>* dropped;  // calls that may still run

    void open(PyObject* address, PyObject* its_handle, PyObject* its_check, PyObject* type);
    void close();
    // Lets go of dropped calls that are done.
    void sweep() {
        if (!dropped->empty()) release_ended();
    }

private:
    void release_ended();
};

struct StartedCall;
// Returns what wait() returns once a call has succeeded.
using Outcome = PyObject* (*)(StartedCall& call);

// The Python object.
struct StartedCall {
    PyObject object;
    CallOwner* owner;  // nullptr: not started
    PendingCall pending;
    PyObject* result;  // that the call was started with; may be nullptr
    Outcome outcome;
    bool moves_little;  // it keeps the GIL until it waits

    // Starts the call, which moves so many bytes: `start(&work)` returns the status. Takes the references of the memory
    // and of the result.
    template <class Start>
    int start(CallOwner& its_owner, const CallMemory& memory, PyObject* its_result, uint64_t bytes, Start start) {
        hold(memory, its_result);
        moves_little = bytes <= LITTLE_BYTES;
        return started(its_owner, run_core(bytes, [&] { return start(&pending.work); }));
    }
    // Its two steps with the GIL.
    void hold(const CallMemory& memory, PyObject* its_result) {
        pending.memory = memory;
        result = its_result;
    }
    int started(CallOwner& its_owner, int status) {
        if (status == RC_OK) {
            owner = &its_owner;
            Py_INCREF(&its_owner.object);
        } else {
            reset();
        }
        return status;
    }

    // False: the exception is set.
    bool check_started() const {
        if (!owner) PyErr_SetString(PyExc_RuntimeError, "expected a call that was started");
        return owner;
    }
    // Returns a status, which end() takes.
    int wait(double timeout) const {
        const auto wait = [&] { return rc_work_wait(pending.work, timeout, nullptr); };
        return moves_little ? run_core(0, wait) : without_gil(wait);
    }
    // Returns the outcome of the call, or raises its error. Lets go of the memory, unless the wait was interrupted.
    PyObject* end(int status);

    int visit(visitproc visitor, void* arg);
    // Forgets the call. If it may still run, the owner keeps it with its memory.
    void reset();
};

// The result that the call was started with; the rank from which a receive has received.
PyObject* given_result(StartedCall& call);
PyObject* sender(StartedCall& call);

// Source, tag and bytes of a message.
inline PyObject* fields_of(const rc_message& message) {
    return Py_BuildValue("iLK", message.source, static_cast<long long>(message.tag),
                         static_cast<unsigned long long>(message.bytes));
}

// The type of StartedCall, which add_started_call_type() makes.
inline PyTypeObject* started_call_type;
int add_started_call_type(PyObject* module);
int add_message_types(PyObject* module);  // messages.cpp
// The method cancel() of calls that are messages: whether it has withdrawn a receive that no message has matched.
PyObject* cancel_call(PyObject* self, PyObject*);
// The slots of an object that takes part in garbage collection, by its methods visit() and reset().
template <class Object>
struct Collected {
    static Object& of(PyObject* self) { return *reinterpret_cast<Object*>(self); }
    static int traverse(PyObject* self, visitproc visitor, void* arg) { return of(self).visit(visitor, arg); }
    static int clear(PyObject* self) {
        of(self).reset();
        return 0;
    }
    static void drop(PyObject* self) {
        PyObject_GC_UnTrack(self);
        of(self).reset();
        release(self);
    }
};
#define COLLECTED_SLOTS(Object)                                                                      \
    slot(Py_tp_dealloc, Collected<Object>::drop), slot(Py_tp_traverse, Collected<Object>::traverse), \
        slot(Py_tp_clear, Collected<Object>::clear)
constexpr unsigned COLLECTED = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE;

// Adds a type to the module, as a subclass of `base` unless that is nullptr. Returns it, a borrowed reference; nullptr:
// the exception is set.
PyTypeObject* add_type(PyObject* module, PyType_Spec& spec, PyTypeObject* base = nullptr);

}  // namespace ringcomm
