// One send or receive of an array on a GPU, as the fast path and Python start it and wait for it.
#pragma once
#include <Python.h>

#include "calls.h"
#include "ringcomm.h"

namespace ringcomm {

// Waits until a started message is launched, and lets its stream wait for the end.
inline int end_message(rc_work* work, void* stream, rc_message& message) {
    const int status = rc_work_wait_launched(work, OWN_TIMEOUT, stream, &message.source);
    rc_work_free(work);
    return status;
}
inline int launch_message(rc_comm* comm, const rc_transfer& transfer, rc_message& message) {
    rc_work* work;
    const int status = rc_transfer_start(comm, &transfer, &work);
    return status == RC_OK ? end_message(work, transfer.stream, message) : status;
}

// What a message that Python waits for needs of its communicator, and of the kind of its array.
struct MessageOwner {
    rc_comm* comm;
    PyObject* handle;   // keeps comm alive
    PyObject* check;    // raises the error behind a status
    PyObject* current;  // current(ordinal) is the current stream, as in GpuArrays
    int ordinal;
    bool blocking;  // a wait lasts until the message has moved
};

// The type GpuMessage (ringcomm/transports/cuda/messages.py). Returns -1 if the exception is set.
int add_gpu_message_type(PyObject* module);
// Makes a message of a subclass of it, which start() starts; takes the reference of the stream.
PyObject* make_gpu_message(PyTypeObject* type, const MessageOwner& owner, const rc_transfer& call, PyObject* stream);

// The current stream as CUDA has it, and as an object that keeps it alive, an owned reference. nullptr: the exception
// is set.
PyObject* current_stream(PyObject* current, int ordinal, void*& stream);

}  // namespace ringcomm
