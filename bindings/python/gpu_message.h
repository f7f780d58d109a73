// One send or receive of an array on a GPU, as the fast path and Python start it and wait for it.
#pragma once
#include <Python.h>

#include "calls.h"
#include "ringcomm.h"

namespace ringcomm {

struct MessageCall {
    int kind;  // an rc_gpu_message
    void* data;
    uint64_t count;
    int dtype, peer;
    int64_t tag;
    double timeout;
    void* stream;  // the one after whose work it moves

    int start(rc_comm* comm, bool async, rc_work*& work) const {
        return rc_gpu_message_start(comm, kind, data, count, dtype, peer, tag, timeout, stream, async, &work);
    }
    // Returns once the message is launched.
    int run(rc_comm* comm, int& source) const {
        rc_work* work;
        int status = start(comm, false, work);
        return status == RC_OK ? end(work, source) : status;
    }
    int end(rc_work* work, int& source) const {
        const int status = rc_work_wait_launched(work, OWN_TIMEOUT, stream, &source);
        rc_work_free(work);
        return status;
    }
};

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
PyObject* make_gpu_message(PyTypeObject* type, const MessageOwner& owner, const MessageCall& call, PyObject* stream);

// The current stream as CUDA has it, and as an object that keeps it alive, an owned reference. nullptr: the exception
// is set.
PyObject* current_stream(PyObject* current, int ordinal, void*& stream);

}  // namespace ringcomm
