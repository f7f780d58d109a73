// The fast path: plain calls on contiguous NumPy arrays and PyTorch tensors in host memory, and on arrays of CuPy and
// PyTorch on the GPU of a connected group, from Python's C API straight into the core.
//
// Each method takes the arguments of the communicator's method of that name; with async_op it returns a StartedCall.
// For any other call it returns NotImplemented, without side effects, and ringcomm/communicator.py makes the call or
// raises the error.
#include "fast_path.h"

#include <algorithm>

#include "object_records.h"
#include "requests.h"

using namespace ringcomm;

namespace {

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
    PyObject* const done = run(fast_path, result, UINT64_MAX, [&] {
        return rc_gpus_call(group, code, &call, address, OWN_TIMEOUT, RC_GPUS_FAST, &launch);
    });
    fast_path.launched(stream, launch);
    Py_DECREF(handle);
    return done;
}

}  // namespace

template <int code, bool as_bytes>
PyObject* ringcomm::collective(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    constexpr Collective row = collectives[code];
    constexpr Form form = form_of(row);
    constexpr bool divides = row.given == Data::BLOCKS;
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments arguments(fast_path, values, number);
    PyObject *x, *out, *async_op;
    int op = RC_SUM, root = 0;
    if (fast_path.deferred) return not_plain();
    if (!arguments.object(x) || !arguments.object(out)) return not_plain();
    if (row.reduces && !arguments.op(op)) return not_plain();
    if (row.rooted() && !arguments.rank(root)) return not_plain();
    if (!arguments.nothing_but(async_op)) return not_plain();

    const auto read = [&](PyObject* given, Array& array, bool writable) {
        return as_bytes ? fast_path.arrays.read_bytes(given, array, writable) : fast_path.read(given, array, writable);
    };
    const bool is_root = fast_path.rank == root, gives = row.given_by == Ranks::ALL || row.in_place() || is_root;
    const bool gets = row.got_by == Ranks::ALL || is_root, in_place = gets && !out && form == AS_GIVEN;
    if (as_bytes && code != RC_BROADCAST && gets && !out) return not_plain();
    Array source, target;
    uint64_t count = 0, expected = 0;  // as rc_collective counts; elements of the result
    if (gives) {
        const bool only_read = row.given_by == Ranks::ROOT && is_root;
        if (!x || !read(x, source, in_place && !only_read)) return not_plain();
        if (source.numpy && PyArray_NDIM(source.numpy) > MOST_AXES) return not_plain();
        if (divides && !is_divisible(as_bytes ? PyArray_SIZE(source.numpy) : rows_of(x), fast_path.size)) {
            return not_plain();
        }
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
        if (!read(result, target, true)) {
            Py_DECREF(result);
            return not_plain();
        }
    } else {
        if (!out || !read(out, target, true)) return not_plain();
        if (gives && (target.count != expected || target.dtype != source.dtype)) return not_plain();
        if (!gives) {
            count = target.count;
            source.dtype = target.dtype;
        }
        result = Py_NewRef(out);
    }
    const rc_call call{source.data, target.data, count, source.dtype, op, 1.0, root, nullptr, nullptr};
    if (source.on_gpu || target.on_gpu) {
        const bool both = (!gives || source.on_gpu) && (!gets || target.on_gpu) && async_op == Py_False;
        return launch(fast_path, code, call, gives ? source : target, both, result);
    }
    const uint64_t bytes = std::max(source.bytes(), target.bytes());
    return run_or_start(fast_path, async_op, gives ? x : nullptr, result, bytes,
                        [&](rc_work** work) { return rc_collective(fast_path.comm, code, &call, OWN_TIMEOUT, work); });
}

template <>
PyObject* ringcomm::collective<RC_BARRIER>(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    PyObject* async_op;
    const bool deferred = fast_path.deferred || fast_path.barriers_deferred;
    if (deferred || !Arguments(fast_path, values, number).nothing_but(async_op)) return not_plain();
    const rc_call call{};
    return run_or_start(fast_path, async_op, nullptr, Py_NewRef(Py_None), 0, [&](rc_work** work) {
        return rc_collective(fast_path.comm, RC_BARRIER, &call, OWN_TIMEOUT, work);
    });
}

#define MOVES(name, NAME)                                                                                      \
    template PyObject* ringcomm::collective<RC_##NAME, moves_as_bytes(RC_##NAME)>(PyObject*, PyObject* const*, \
                                                                                  Py_ssize_t);
#define COLLECTIVE_ROW PUBLIC_ROW
#include "ringcomm/types.def"
#undef MOVES

namespace {

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

// defer_barriers(whether): the same for barriers alone, which wait for the calls on GPUs.
PyObject* defer_barriers(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    if (number != 1) return PyErr_Format(PyExc_TypeError, "defer_barriers takes a bool");
    reinterpret_cast<FastPath*>(self)->barriers_deferred = values[0] == Py_True;
    Py_RETURN_NONE;
}

PyObject* release_ended(PyObject* self, PyObject* const*, Py_ssize_t) {
    reinterpret_cast<FastPath*>(self)->sweep();
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
    PyObject *address, *handle, *check, *tensors, *dtypes, *ops, *call_type;
    int rank, size;
    if (!PyArg_ParseTuple(arguments, "O!OOO!O!O!iiO!", &PyLong_Type, &address, &handle, &check, &PySet_Type, &tensors,
                          &PyDict_Type, &dtypes, &PyDict_Type, &ops, &rank, &size, &PyType_Type, &call_type)) {
        return nullptr;
    }
    auto* const fast_path = allocate<FastPath>(type);
    if (!fast_path) return nullptr;
    fast_path->open(address, handle, check, call_type);
    fast_path->arrays.tensors = Py_NewRef(tensors);
    fast_path->arrays.dtypes.dict = Py_NewRef(dtypes);
    fast_path->ops.dict = Py_NewRef(ops);
    fast_path->rank = rank;
    fast_path->size = size;
    return &fast_path->object;
}

void destroy(PyObject* self) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    fast_path.close();
    for (const Codes& codes : {fast_path.arrays.dtypes, fast_path.ops}) {
        Py_DECREF(codes.dict);
        Py_XDECREF(codes.last);
    }
    for (PyObject* held : {fast_path.gpus.types, fast_path.message_gpus.types, fast_path.group_handle,
                           fast_path.last_stream, reinterpret_cast<PyObject*>(fast_path.message_type)}) {
        Py_XDECREF(held);
    }
    Py_DECREF(fast_path.arrays.tensors);
    release(self);
}

PyMethodDef methods[] = {
#define MOVES(name, NAME) method<collective<RC_##NAME>>(#name),
#define COLLECTIVE_ROW PUBLIC_ROW
#include "ringcomm/types.def"
#define BYTES_AND_OBJECTS(name, NAME) \
    method<collective<RC_##NAME, true>>(#name "_bytes"), method<object_collective<RC_##NAME>>(#name "_object")
    BYTES_AND_OBJECTS(broadcast, BROADCAST),
    BYTES_AND_OBJECTS(gather, GATHER),
    BYTES_AND_OBJECTS(scatter, SCATTER),
    BYTES_AND_OBJECTS(all_gather, ALL_GATHER),
    BYTES_AND_OBJECTS(all_to_all, ALL_TO_ALL),
    method<send_object>("send_object"),
    method<recv_object>("recv_object"),
    method<send>("send"),
    method<recv>("recv"),
    method<recv_message>("recv_message"),
    method<sendrecv>("sendrecv"),
    method<sendrecv_message>("sendrecv_message"),
    method<connect_gpus>("connect_gpus"),
    method<connect_messages>("connect_messages"),
    method<disconnect_gpus>("disconnect_gpus"),
    method<defer_collectives>("defer_collectives"),
    method<defer_barriers>("defer_barriers"),
    method<release_ended>("release_ended"),
    {},
};

PyType_Slot slots[] = {
    constructor<create>(),
    slot(Py_tp_dealloc, destroy),
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._fast_path.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                 slots};

// The module of what Python calls without cffi, in the library of ringcomm._native, because it must share the core's
// state.
int fill(PyObject* module) {
    if (PyArray_ImportNumPyAPI() < 0 || !names.intern()) return -1;
    for (const auto add : {add_started_call_type, add_gpu_message_type, add_message_types, add_request_types}) {
        if (add(module) < 0) return -1;
    }
    if (!add_type(module, spec) || PyModule_AddIntConstant(module, "RECORD", sizeof(ObjectRecord)) < 0) return -1;
    return PyModule_AddIntConstant(module, "LARGE", LARGE_BYTES);
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {}};
PyMethodDef functions[] = {
    method<pack_objects>("pack_objects"),       method<open_objects>("open_objects"),
    method<has_large_array>("has_large_array"), method_of_one<wait_all>("wait_all"),
    method_of_one<test_all>("test_all"),        method_of_one<find_done>("find_done"),
    method_of_one<start_all>("start_all"),      method<make_handler>("make_handler"),
    method_of_one<set_handler>("set_handler"),  {},
};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "_fast_path", nullptr, 0,      functions,
                       module_slots,          nullptr,      nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__fast_path(void) { return PyModuleDef_Init(&definition); }
