// The fast path: plain calls on contiguous NumPy arrays and PyTorch tensors in host memory, and on arrays of CuPy and
// PyTorch on the GPU of a connected group, from Python's C API straight into the core.
//
// A second module in the library of ringcomm._native, because it must share the core's state. Each method takes the
// arguments of the communicator's method of that name. For any other call it returns NotImplemented, without side
// effects, and ringcomm/communicator.py makes the call or raises the error.
#include "calls.h"
#include "core/collectives.h"
#include "fast_arrays.h"
#include "gpu_arrays.h"
#include "gpu_message.h"
#include "object_record.h"

using namespace ringcomm;

namespace {

// The Python object.
struct FastPath {
    PyObject object;
    rc_comm* comm;
    PyObject* handle;  // keeps comm alive
    PyObject* check;   // raises the error behind a status
    ArrayReader arrays;
    GpuArrays gpus, message_gpus;  // of collectives, and of messages
    rc_gpus* group;
    PyObject* group_handle;      // keeps it alive
    PyObject* last_stream;       // of the last launch of a collective: CUDA must not be asked about a destroyed one
    uint64_t last_launch;        // the number of that launch
    PyTypeObject* message_type;  // of messages on GPUs that Python waits for
    Codes ops;                   // by name
    int rank, size;
    bool deferred;  // collectives must wait for calls that call_queue.py has queued

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

PyObject* not_plain() { return Py_NewRef(Py_NotImplemented); }

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
        bool async_op;
        return nothing_but(async_op) && !async_op;
    }

    // The same, except async_op, which is the last.
    bool nothing_but(bool& async_op) const {
        for (PyObject* const* value = next_; value < end_ - 1; ++value) {
            if (*value != Py_None) return false;
        }
        async_op = next_ < end_ && end_[-1] == Py_True;
        return next_ < end_ && (async_op || end_[-1] == Py_False);
    }

private:
    FastPath& fast_path_;
    PyObject* const* next_;
    PyObject* const* const end_;
};

// Calls the core without the GIL, and returns `result`, of which it takes the reference; or raises the error.
template <class Call>
PyObject* run(const FastPath& fast_path, PyObject* result, Call call) {
    const int status = without_gil(call);
    if (status == RC_OK) return result;
    Py_DECREF(result);
    if (status == RC_NO_PROGRAM || status == RC_UNPREPARED) return not_plain();
    return raise(fast_path.check, status);
}

// The same for a call that tells the rank from which it has received.
template <class Call>
PyObject* run_for_source(const FastPath& fast_path, Call call) {
    int from = -1;
    PyObject* const done = run(fast_path, Py_NewRef(Py_None), [&] { return call(from); });
    if (done != Py_None) return done;
    Py_DECREF(done);
    return PyLong_FromLong(from);
}

// How arguments and buffers follow from what a collective gives and gets.
enum Form { AS_GIVEN, JOINED, SHARE };  // the result: x's shape, in place without `out`; all blocks; one of the blocks

constexpr Form form_of(const Collective& row) {
    return row.in_place() ? AS_GIVEN : row.got == Data::BLOCKS ? JOINED : SHARE;
}

// Launches a collective, and returns `result` as run() does. `both`: whether all its arrays are on the GPU.
PyObject* launch(FastPath& fast_path, int code, const rc_call& call, const Array& array, bool both, PyObject* result) {
    void* address;
    PyObject* const stream =
        both ? current_stream(GpuArrays::current(array), fast_path.gpus.ordinal, address) : not_plain();
    if (!both || !stream) {
        Py_DECREF(result);
        return stream;
    }
    rc_gpus* const group = fast_path.group;
    if (!group) {
        Py_DECREF(stream);
        Py_DECREF(result);
        return not_plain();
    }
    PyObject* const handle = Py_NewRef(fast_path.group_handle);  // another thread may disconnect
    uint64_t launch = 0;
    PyObject* const done =
        run(fast_path, result, [&] { return rc_gpus_call(group, code, &call, address, -1.0, RC_GPUS_FAST, &launch); });
    fast_path.launched(stream, launch);
    Py_DECREF(handle);
    return done;
}

template <int code>
PyObject* collective(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    constexpr Collective row = collectives[code];
    constexpr Form form = form_of(row);
    constexpr bool divides = row.given == Data::BLOCKS;
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments arguments(fast_path, values, number);
    PyObject *x, *out;
    int op = RC_SUM, root = 0;
    if (fast_path.deferred) return not_plain();
    if (!arguments.object(x) || !arguments.object(out)) return not_plain();
    if (row.reduces && !arguments.op(op)) return not_plain();
    if (row.rooted() && !arguments.rank(root)) return not_plain();
    if (!arguments.nothing_else()) return not_plain();

    const bool is_root = fast_path.rank == root, gives = row.given_by == Ranks::ALL || row.in_place() || is_root;
    const bool gets = row.got_by == Ranks::ALL || is_root, in_place = gets && !out && form == AS_GIVEN;
    Array source, target;
    uint64_t count = 0, expected = 0;  // as rc_collective counts; elements of the result
    if (gives) {
        const bool only_read = row.given_by == Ranks::ROOT && is_root;
        if (!x || !fast_path.read(x, source, in_place && !only_read)) return not_plain();
        if (source.numpy && PyArray_NDIM(source.numpy) > MOST_AXES) return not_plain();
        if (divides && !is_divisible(x, fast_path.size)) return not_plain();
        count = divides ? source.count / fast_path.size : source.count;
        expected = form == JOINED ? count * fast_path.size : form == SHARE ? count : source.count;
    }
    PyObject* result;  // an owned reference
    if (!gets) {
        result = Py_NewRef(Py_None);
    } else if (in_place) {
        target = source;
        result = Py_NewRef(x);
    } else if (gives && !out) {
        const bool added = form == JOINED;
        const Py_ssize_t rows = added ? fast_path.size : PyObject_Size(x) / fast_path.size;
        result = source.numpy ? make_numpy(source.numpy, rows, added)
                              : make_array(x, rows, added, source.on_gpu ? GpuArrays::maker(source) : nullptr);
        if (!result) return nullptr;
        if (!fast_path.read(result, target, true)) {
            Py_DECREF(result);
            return not_plain();
        }
    } else {
        if (!out || !fast_path.read(out, target, true)) return not_plain();
        if (gives && (target.count != expected || target.dtype != source.dtype)) return not_plain();
        if (!gives) {
            count = target.count;
            source.dtype = target.dtype;
        }
        result = Py_NewRef(out);
    }
    const rc_call call{source.data, target.data, count, source.dtype, op, 1.0, root, nullptr};
    if (source.on_gpu || target.on_gpu) {
        const bool both = (!gives || source.on_gpu) && (!gets || target.on_gpu);
        return launch(fast_path, code, call, gives ? source : target, both, result);
    }
    return run(fast_path, result, [&] { return rc_collective(fast_path.comm, code, &call, -1.0, nullptr); });
}

template <>
PyObject* collective<RC_BARRIER>(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    if (fast_path.deferred || !Arguments(fast_path, values, number).nothing_else()) return not_plain();
    const rc_call call{};
    return run(fast_path, Py_NewRef(Py_None),
               [&] { return rc_collective(fast_path.comm, RC_BARRIER, &call, -1.0, nullptr); });
}

// Takes a pickled object, None if pickling has failed. Returns the objects of all ranks, and None; or, if some do not
// fit into a record, None and their sizes.
PyObject* all_gather_record(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    if (fast_path.deferred || number != 1 || (values[0] != Py_None && !PyBytes_Check(values[0]))) return not_plain();
    ObjectRecord own;
    own.pack(values[0]);
    std::vector<ObjectRecord> records(fast_path.size);
    const rc_call call{&own, records.data(), sizeof(ObjectRecord), RC_UINT8, 0, 1.0, 0, nullptr};
    PyObject* const done = run(fast_path, Py_NewRef(Py_None),
                               [&] { return rc_collective(fast_path.comm, RC_ALL_GATHER, &call, -1.0, nullptr); });
    if (done != Py_None) return done;
    Py_DECREF(done);
    return unpack(records);
}

// Makes the call of a message on a GPU. Returns the stream, an owned reference; nullptr: the exception is set.
PyObject* prepare(FastPath& fast_path, int kind, const Array& x, int peer, int64_t tag, MessageCall& call) {
    call = {kind, x.data, x.count, x.dtype, peer, tag, -1.0, nullptr};
    return current_stream(GpuArrays::current(x), fast_path.message_gpus.ordinal, call.stream);
}

// Sends or receives an array on a GPU, and returns the source; with `async_op`, a message to be started.
PyObject* message(FastPath& fast_path, int kind, const Array& x, int peer, int64_t tag, bool async_op) {
    MessageCall call;
    PyObject* const stream = prepare(fast_path, kind, x, peer, tag, call);
    if (!stream) return nullptr;
    if (async_op) {
        const MessageOwner owner{
            fast_path.comm, fast_path.handle, fast_path.check, GpuArrays::current(x), fast_path.message_gpus.ordinal,
            false};
        return make_gpu_message(fast_path.message_type, owner, call, stream);
    }
    PyObject* const from = run_for_source(fast_path, [&](int& source) { return call.run(fast_path.comm, source); });
    Py_DECREF(stream);
    return from;
}

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    bool async_op;
    if (!given.array(array) || !given.rank(peer) || !given.tag(tag) || !given.nothing_but(async_op)) return not_plain();
    Array x;
    if (!fast_path.read_message(array, x, false)) return not_plain();
    if (x.on_gpu) {
        PyObject* const done = message(fast_path, RC_GPU_SEND, x, peer, tag, async_op);
        if (!done || async_op) return done;
        Py_DECREF(done);
        Py_RETURN_NONE;
    }
    if (async_op) return not_plain();
    return run(fast_path, Py_NewRef(Py_None),
               [&] { return rc_send(fast_path.comm, x.data, x.count, x.dtype, peer, tag, -1.0, nullptr); });
}

PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    bool at_most, async_op;
    if (number != 6 || !given.array(array) || !given.source(peer) || !given.tag(tag) || !given.flag(at_most) ||
        !given.nothing_but(async_op)) {
        return not_plain();
    }
    Array x;
    if (!fast_path.read_message(array, x, true)) return not_plain();
    if (x.on_gpu) return message(fast_path, at_most ? RC_GPU_RECV_AT_MOST : RC_GPU_RECV, x, peer, tag, async_op);
    if (async_op) return not_plain();
    return run_for_source(fast_path, [&](int& from) {
        auto* const receive = at_most ? rc_recv_at_most : rc_recv;
        return receive(fast_path.comm, x.data, x.count, x.dtype, peer, tag, -1.0, &from, nullptr);
    });
}

PyObject* recv_message(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject* array;
    int peer;
    int64_t tag;
    if (!given.array(array) || !given.source_or_any(peer) || !given.tag(tag)) return not_plain();
    Array x;
    if (!fast_path.arrays.read(array, x, true)) return not_plain();
    const uint64_t bytes = x.count * uint64_t(rc_dtype_bytes(x.dtype));
    rc_message message;
    PyObject* const done = run(fast_path, Py_NewRef(Py_None), [&] {
        return rc_recv_message(fast_path.comm, x.data, bytes, peer, tag, 0, -1.0, &message, nullptr);
    });
    if (done != Py_None) return done;
    Py_DECREF(done);
    return Py_BuildValue("iLK", message.source, static_cast<long long>(message.tag),
                         static_cast<unsigned long long>(message.bytes));
}

PyObject* exchange(FastPath& fast_path, const Array& x, int dest, const Array& out, int source, int64_t tag) {
    MessageCall sent, received;
    PyObject* const first = prepare(fast_path, RC_GPU_RECV, out, source, tag, received);
    PyObject* const second = first ? prepare(fast_path, RC_GPU_SEND, x, dest, tag, sent) : nullptr;
    PyObject* result = nullptr;
    if (second) {
        rc_work* receive = nullptr;
        result = run(fast_path, Py_NewRef(Py_None), [&] {
            const int status = received.start(fast_path.comm, false, receive);
            return status == RC_OK ? sent.run(fast_path.comm, dest) : status;
        });
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);  // the first error is raised, but no memory may be in use then
        if (receive) {
            Py_XDECREF(result);
            result = run_for_source(fast_path, [&](int& from) { return received.end(receive, from); });
        }
        if (type) {
            Py_XDECREF(std::exchange(result, nullptr));
            PyErr_Restore(type, error, traceback);
        }
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

PyObject* sendrecv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments given(fast_path, values, number);
    PyObject *sent, *received;
    int dest, source;
    int64_t tag;
    if (!given.array(sent) || !given.rank(dest) || !given.array(received) || !given.source(source) || !given.tag(tag) ||
        !given.nothing_else()) {
        return not_plain();
    }
    Array x, out;
    if (!fast_path.read_message(sent, x, false) || !fast_path.read_message(received, out, true)) return not_plain();
    if (x.on_gpu && out.on_gpu) return exchange(fast_path, x, dest, out, source, tag);
    if (x.on_gpu || out.on_gpu) return not_plain();
    return run_for_source(fast_path, [&](int& from) {
        return rc_sendrecv(fast_path.comm, x.data, x.count, x.dtype, dest, out.data, out.count, out.dtype, source, tag,
                           -1.0, &from);
    });
}

// connect_gpus(address, handle, types, ordinal): from now on launches collectives of arrays on this GPU.
PyObject* connect_gpus(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    if (number != 4 || !PyLong_Check(values[0])) {
        return PyErr_Format(PyExc_TypeError, "connect_gpus takes an address, a handle, a dict and an ordinal");
    }
    if (!fast_path.gpus.connect(values[2], values[3])) return nullptr;
    fast_path.group = static_cast<rc_gpus*>(PyLong_AsVoidPtr(values[0]));
    Py_XDECREF(std::exchange(fast_path.group_handle, Py_NewRef(values[1])));
    Py_RETURN_NONE;
}

// connect_messages(types, ordinal, type): from now on starts messages of arrays on this GPU; with async_op it makes
// objects of this type.
PyObject* connect_messages(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    if (number != 3 || !PyType_Check(values[2])) {
        return PyErr_Format(PyExc_TypeError, "connect_messages takes a dict, an ordinal and a type");
    }
    PyTypeObject* const before = fast_path.message_type;
    fast_path.message_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(values[2]));
    Py_XDECREF(reinterpret_cast<PyObject*>(before));
    return fast_path.message_gpus.connect(values[0], values[1]) ? Py_NewRef(Py_None) : nullptr;
}

// defer_collectives(whether): they return NotImplemented meanwhile.
PyObject* defer_collectives(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    if (number != 1) return PyErr_Format(PyExc_TypeError, "defer_collectives takes a bool");
    reinterpret_cast<FastPath*>(self)->deferred = values[0] == Py_True;
    Py_RETURN_NONE;
}

// The group is closed. A call of another thread that is still in it keeps its handle.
PyObject* disconnect_gpus(PyObject* self, PyObject* const*, Py_ssize_t) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    fast_path.group = nullptr;
    fast_path.gpus.disconnect();
    Py_XDECREF(std::exchange(fast_path.group_handle, nullptr));
    Py_XDECREF(std::exchange(fast_path.last_stream, nullptr));
    Py_RETURN_NONE;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *address, *handle, *check, *tensors, *dtypes, *ops;
    int rank, size;
    if (!PyArg_ParseTuple(arguments, "O!OOO!O!O!ii", &PyLong_Type, &address, &handle, &check, &PySet_Type, &tensors,
                          &PyDict_Type, &dtypes, &PyDict_Type, &ops, &rank, &size)) {
        return nullptr;
    }
    auto* const fast_path = allocate<FastPath>(type);
    if (!fast_path) return nullptr;
    fast_path->comm = static_cast<rc_comm*>(PyLong_AsVoidPtr(address));
    fast_path->handle = Py_NewRef(handle);
    fast_path->check = Py_NewRef(check);
    fast_path->arrays.tensors = Py_NewRef(tensors);
    fast_path->arrays.dtypes.dict = Py_NewRef(dtypes);
    fast_path->ops.dict = Py_NewRef(ops);
    fast_path->rank = rank;
    fast_path->size = size;
    return &fast_path->object;
}

void destroy(PyObject* self) {
    const FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    for (const Codes& codes : {fast_path.arrays.dtypes, fast_path.ops}) {
        Py_DECREF(codes.dict);
        Py_XDECREF(codes.last);
    }
    for (PyObject* held : {fast_path.gpus.types, fast_path.message_gpus.types, fast_path.group_handle,
                           fast_path.last_stream, reinterpret_cast<PyObject*>(fast_path.message_type)}) {
        Py_XDECREF(held);
    }
    Py_DECREF(fast_path.handle);
    Py_DECREF(fast_path.check);
    Py_DECREF(fast_path.arrays.tensors);
    release(self);
}

PyMethodDef methods[] = {
#define MOVES(name, NAME) method(#name, collective<RC_##NAME>),
#define REDUCES MOVES
#define INTERNAL(name, NAME)
#define COLLECTIVE_ROW(name, NAME, given, given_by, got, got_by, kind) kind(name, NAME)
#include "ringcomm/types.def"
    method("all_gather_record", all_gather_record),
    method("send", send),
    method("recv", recv),
    method("recv_message", recv_message),
    method("sendrecv", sendrecv),
    method("connect_gpus", connect_gpus),
    method("connect_messages", connect_messages),
    method("disconnect_gpus", disconnect_gpus),
    method("defer_collectives", defer_collectives),
    {},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._fast_path.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                 slots};

int fill(PyObject* module) {
    if (PyArray_ImportNumPyAPI() < 0 || !names.intern() || add_gpu_message_type(module) < 0) return -1;
    PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
    if (!type) return -1;
    const int added = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    return added;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {}};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "_fast_path", nullptr, 0,      nullptr,
                       module_slots,          nullptr,      nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__fast_path(void) { return PyModuleDef_Init(&definition); }
