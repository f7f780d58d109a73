// The object of the fast path, and the arguments of its methods. A method returns NotImplemented for any call that is
// not plain.
#pragma once
#include "calls.h"
#include "core/collectives.h"
#include "fast_arrays.h"
#include "gpu_arrays.h"
#include "gpu_message.h"
#include "started_call.h"

namespace ringcomm {

// The Python object.
struct FastPath : CallOwner {
    ArrayReader arrays;
    GpuArrays gpus, message_gpus;  // of collectives, and of messages
    rc_gpus* group;
    PyObject* group_handle;      // keeps it alive
    PyObject* last_stream;       // of the last launch of a collective: CUDA must not be asked about a destroyed one
    uint64_t last_launch;        // the number of that launch
    PyTypeObject* message_type;  // of messages on GPUs that Python waits for
    Codes ops;                   // by name
    int rank, size;
    bool deferred;           // collectives must wait for calls that staged/queue.py has queued
    bool barriers_deferred;  // they wait for calls on GPUs too

    // A collective has been launched on a stream, whose reference is taken: the next launch may wait for it.
    void launched(PyObject* stream, uint64_t launch) {
        const bool newer = group && launch > last_launch;  // another thread may have launched since, or disconnected
        if (newer) last_launch = launch;
        Py_XDECREF(newer ? std::exchange(last_stream, stream) : stream);
    }

    bool read(PyObject* given, Array& array, bool writable) {
        return arrays.read(given, array, writable) || gpus.read(arrays, given, array, writable);
    }
    bool read_message(PyObject* given, Array& array, bool writable) {
        return arrays.read(given, array, writable) || message_gpus.read(arrays, given, array, writable);
    }
};

inline PyObject* not_plain() { return Py_NewRef(Py_NotImplemented); }

// The positional arguments. Each function takes the next one and returns whether the fast path supports it.
class Arguments {
public:
    Arguments(FastPath& fast_path, PyObject* const* values, Py_ssize_t count)
        : fast_path_(fast_path), next_(values), end_(values + count) {}

    // None becomes nullptr.
    bool object(PyObject*& object) {
        if (next_ == end_) return false;
        object = *next_++;
        if (object == Py_None) object = nullptr;
        return true;
    }

    // Read at the end, because it costs the most.
    bool array(PyObject*& object) { return this->object(object) && object; }

    bool op(int& code) { return next_ != end_ && PyUnicode_CheckExact(*next_) && fast_path_.ops.find(*next_++, code); }

    bool rank(int& rank) { return next_ != end_ && small(*next_++, rank) && rank >= 0 && rank < fast_path_.size; }

    bool source(int& rank) {
        if (next_ == end_ || *next_ != Py_None) return this->rank(rank);
        ++next_;
        rank = -1;
        return true;
    }

    // The same where any rank is -1.
    bool source_or_any(int& rank) {
        return next_ != end_ && small(*next_++, rank) && rank >= -1 && rank < fast_path_.size;
    }

    bool tag(int64_t& tag) {
        if (next_ == end_ || !PyLong_CheckExact(*next_)) return false;
        int overflow;
        tag = PyLong_AsLongLongAndOverflow(*next_++, &overflow);
        return !overflow;
    }

    bool flag(bool& flag) {
        if (next_ == end_) return false;
        flag = *next_++ == Py_True;
        return true;
    }

    // The rest (counts, a timeout, async_op) must have their defaults.
    bool nothing_else() const {
        PyObject* async_op;
        return nothing_but(async_op) && async_op == Py_False;
    }

    // The same, except async_op, which is the last: False, True, or a StartedCall that has not been started yet.
    bool nothing_but(PyObject*& async_op) const {
        for (PyObject* const* value = next_; value < end_ - 1; ++value) {
            if (*value != Py_None) return false;
        }
        if (next_ >= end_) return false;
        async_op = end_[-1];
        return PyBool_Check(async_op) ||
               (PyObject_TypeCheck(async_op, started_call_type) && !reinterpret_cast<StartedCall*>(async_op)->owner);
    }

private:
    FastPath& fast_path_;
    PyObject* const* next_;
    PyObject* const* const end_;
};

// Makes a call of the core that moves so many bytes, and returns `result`, of which it takes the reference; or raises
// the error.
template <class Call>
PyObject* run(const FastPath& fast_path, PyObject* result, uint64_t bytes, Call call) {
    const int status = run_core(bytes, call);
    if (status == RC_OK) return result;
    Py_DECREF(result);
    if (status == RC_UNPREPARED) return not_plain();
    return raise(fast_path.check, status);
}

// The same of call(work). Unless async_op is False, it starts the call, which uses `source`, an array or nullptr, and
// the result, and returns it: the StartedCall that was given, else a new one.
template <class Call>
PyObject* run_or_start(FastPath& fast_path, PyObject* async_op, PyObject* source, PyObject* result, uint64_t bytes,
                       Call call, Outcome outcome = given_result) {
    if (async_op == Py_False) return run(fast_path, result, bytes, [&] { return call(nullptr); });
    auto* const started = async_op == Py_True ? allocate<StartedCall>(fast_path.call_type)
                                              : reinterpret_cast<StartedCall*>(Py_NewRef(async_op));
    if (!started) {
        Py_DECREF(result);
        return nullptr;
    }
    fast_path.sweep();
    started->outcome = outcome;
    const int status = started->start(fast_path, {{}, Py_XNewRef(source), Py_NewRef(result)}, result, bytes, call);
    return run(fast_path, &started->object, 0, [status] { return status; });
}

// fast_path.cpp: the method of a collective. With `as_bytes` it takes NumPy arrays of any dtypes, as MPI does: `out` is
// needed, but for broadcast, and of the options it takes async_op only.
template <int code, bool as_bytes = false>
PyObject* collective(PyObject* self, PyObject* const* values, Py_ssize_t number);
template <>
PyObject* collective<RC_BARRIER>(PyObject* self, PyObject* const* values, Py_ssize_t number);

// Whether requests.cpp starts it `as_bytes`: so those of MPI move data.
constexpr bool moves_as_bytes(int code) { return !collectives[code].reduces && code != RC_BARRIER; }

// For the public rows of types.def: MOVES(name, NAME) of each.
#define REDUCES(name, NAME) MOVES(name, NAME)
#define AS_ALL_GATHER(name, NAME)
#define AS_BARRIER(name, NAME)
#define PUBLIC_ROW(name, NAME, given, given_by, got, got_by, kind) kind(name, NAME)

// fast_messages.cpp
PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* recv_message(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* sendrecv(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* sendrecv_message(PyObject* self, PyObject* const* values, Py_ssize_t number);

// fast_objects.cpp: the collectives of ringcomm/objects.py
template <int code>
PyObject* object_collective(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* pack_objects(PyObject*, PyObject* const* values, Py_ssize_t number);
PyObject* open_objects(PyObject*, PyObject* const* values, Py_ssize_t number);
PyObject* has_large_array(PyObject*, PyObject* const* values, Py_ssize_t number);
PyObject* send_object(PyObject* self, PyObject* const* values, Py_ssize_t number);
PyObject* recv_object(PyObject* self, PyObject* const* values, Py_ssize_t number);

// shared_arrays.cpp
PyObject* make_handler(PyObject*, PyObject* const* values, Py_ssize_t number);
PyObject* set_handler(PyObject*, PyObject* handler);

}  // namespace ringcomm
