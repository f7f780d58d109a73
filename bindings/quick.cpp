// The plain call without Python on the way: NumPy arrays that fit, an operation by its name, nothing unusual.
//
// A second module in the library of ringcomm._native, for it must share the core's state. Each method takes what the
// communicator's method of that name was given. Of anything but the plain case it knows nothing: it returns
// NotImplemented before anything has happened, and ringcomm/communicator.py does the call, or says what is wrong.
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <initializer_list>
#include <utility>

#include "ringcomm.h"

namespace {

constexpr int MOST_AXES = 32;            // of NumPy 1; whoever has more takes the long way
constexpr int WARN_ON_WRITE = 1u << 31;  // a flag that NumPy's headers leave out

// An exact int that fits into a C int.
bool small(PyObject* number, int& value) {
    if (!number || !PyLong_CheckExact(number)) return false;
    int overflow;
    const long found = PyLong_AsLongAndOverflow(number, &overflow);
    value = int(found);
    return !overflow && found == value;
}

// A dict from things to their codes. It is asked for the same thing again and again, so the last answer is at hand.
struct Codes {
    PyObject *dict, *last;
    int last_code;

    bool find(PyObject* thing, int& code) {
        if (thing != last) {
            PyObject* found = PyDict_GetItemWithError(dict, thing);
            if (!found) PyErr_Clear();  // whatever is wrong with it shows on the long way
            if (!small(found, code)) return false;
            Py_XDECREF(std::exchange(last, Py_NewRef(thing)));
            last_code = code;
        }
        code = last_code;
        return true;
    }
};

// What Python sees of a communicator.
struct Quick {
    PyObject object;
    rc_comm* comm;
    PyObject* handle;  // keeps comm alive
    PyObject* check;   // raises the error behind a status
    Codes dtypes;      // of NumPy, as far as they were met
    Codes ops;         // by name
    int rank, size;
};

struct Array {
    PyArrayObject* object = nullptr;
    void* data = nullptr;
    uint64_t count = 0;
    int dtype = 0;
};

PyObject* not_plain() { return Py_NewRef(Py_NotImplemented); }

// What was passed, one after the other. Each function takes the next and says whether it is plain.
class Arguments {
public:
    Arguments(Quick& quick, PyObject* const* values, Py_ssize_t count)
        : quick_(quick), next_(values), end_(values + count) {}

    // None is plain: it becomes a nullptr.
    bool object(PyObject*& object) {
        if (next_ == end_) return false;
        object = *next_++;
        if (object == Py_None) object = nullptr;
        return true;
    }

    bool array(Array& array, bool writable) {
        PyObject* given;
        return object(given) && read(given, array, writable);
    }

    bool read(PyObject* given, Array& array, bool writable) const {
        if (!given || !PyArray_CheckExact(given)) return false;
        array.object = reinterpret_cast<PyArrayObject*>(given);
        const int flags = PyArray_FLAGS(array.object);
        if (!(flags & NPY_ARRAY_C_CONTIGUOUS)) return false;
        if (writable && (!(flags & NPY_ARRAY_WRITEABLE) || flags & WARN_ON_WRITE)) return false;
        array.data = PyArray_DATA(array.object);
        array.count = PyArray_SIZE(array.object);
        return quick_.dtypes.find(reinterpret_cast<PyObject*>(PyArray_DESCR(array.object)), array.dtype);
    }

    bool op(int& code) { return next_ != end_ && PyUnicode_CheckExact(*next_) && quick_.ops.find(*next_++, code); }

    bool rank(int& rank) { return next_ != end_ && small(*next_++, rank) && rank >= 0 && rank < quick_.size; }

    bool source(int& rank) {
        if (next_ == end_ || *next_ != Py_None) return this->rank(rank);
        ++next_;
        rank = -1;
        return true;
    }

    bool tag(int64_t& tag) {
        if (next_ == end_ || !PyLong_CheckExact(*next_)) return false;
        int overflow;
        tag = PyLong_AsLongLongAndOverflow(*next_++, &overflow);
        return !overflow;
    }

    // The rest: counts, a timeout, and at last async_op. Plain is what asks for none of them.
    bool nothing_else() const {
        for (PyObject* const* value = next_; value < end_ - 1; ++value) {
            if (*value != Py_None) return false;
        }
        return next_ < end_ && end_[-1] == Py_False;
    }

private:
    Quick& quick_;
    PyObject* const* next_;
    PyObject* const* const end_;
};

// Calls the core, which may wait, while other threads run Python. False: the exception is set.
template <class Call>
bool run(const Quick& quick, Call call) {
    PyThreadState* const thread = PyEval_SaveThread();
    const int status = call();
    PyEval_RestoreThread(thread);
    if (status == RC_OK) return true;
    Py_XDECREF(PyObject_CallFunction(quick.check, "i", status));
    return false;
}

// How buffers and counts of a collective follow from its arguments: a new collective is a row.
enum Who { EVERYBODY, ROOT };
enum Form { AS_GIVEN, JOINED, SHARE };  // the result: x's shape, in place without `out`; all blocks; one of the blocks

struct Row {
    int collective;
    bool has_op, has_root;
    Who gives, gets;
    bool divides;  // axis 0 of x into the blocks of the ranks
    Form form;
};

// clang-format off: a row a line
constexpr Row broadcast{     RC_BROADCAST,      false, true,  EVERYBODY, EVERYBODY, false, AS_GIVEN},
              reduce{        RC_REDUCE,         true,  true,  EVERYBODY, ROOT,      false, AS_GIVEN},
              all_reduce{    RC_ALL_REDUCE,     true,  false, EVERYBODY, EVERYBODY, false, AS_GIVEN},
              gather{        RC_GATHER,         false, true,  EVERYBODY, ROOT,      false, JOINED},
              scatter{       RC_SCATTER,        false, true,  ROOT,      EVERYBODY, true,  SHARE},
              all_gather{    RC_ALL_GATHER,     false, false, EVERYBODY, EVERYBODY, false, JOINED},
              reduce_scatter{RC_REDUCE_SCATTER, true,  false, EVERYBODY, EVERYBODY, true,  SHARE},
              all_to_all{    RC_ALL_TO_ALL,     false, false, EVERYBODY, EVERYBODY, true,  AS_GIVEN};
// clang-format on

// A new array for the result, like x but for its first axis. nullptr: the exception is set.
PyObject* make(const Quick& quick, const Row& row, PyArrayObject* x) {
    const int axes = PyArray_NDIM(x), added = row.form == JOINED;
    npy_intp shape[MOST_AXES + 1];
    for (int axis = 0; axis < axes; ++axis) shape[axis + added] = PyArray_DIM(x, axis);
    shape[0] = added ? quick.size : shape[0] / quick.size;
    PyArray_Descr* dtype = PyArray_DESCR(x);
    Py_INCREF(reinterpret_cast<PyObject*>(dtype));  // the array takes it
    return PyArray_Empty(axes + added, shape, dtype, false);
}

template <const Row& row>
PyObject* collective(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Quick& quick = *reinterpret_cast<Quick*>(self);
    Arguments arguments(quick, values, number);
    PyObject *x, *out;
    int op = RC_SUM, root = 0;
    if (!arguments.object(x) || !arguments.object(out)) return not_plain();
    if (row.has_op && !arguments.op(op)) return not_plain();
    if (row.has_root && !arguments.rank(root)) return not_plain();
    if (!arguments.nothing_else()) return not_plain();

    const bool is_root = quick.rank == root, gives = row.gives == EVERYBODY || is_root;
    const bool gets = row.gets == EVERYBODY || is_root, in_place = gets && !out && row.form == AS_GIVEN;
    Array source, target;
    uint64_t count = 0, expected = 0;  // as rc_collective counts; elements of the result
    if (gives) {
        const bool only_read = row.collective == RC_BROADCAST && is_root;
        if (!arguments.read(x, source, in_place && !only_read)) return not_plain();
        const int axes = PyArray_NDIM(source.object);
        if (axes > MOST_AXES) return not_plain();
        if (row.divides && (axes == 0 || PyArray_DIM(source.object, 0) % quick.size)) return not_plain();
        count = row.divides ? source.count / quick.size : source.count;
        expected = row.form == JOINED ? count * quick.size : row.form == SHARE ? count : source.count;
    }
    PyObject* result;  // a reference of our own
    if (!gets) {
        result = Py_NewRef(Py_None);
    } else if (in_place) {
        target = source;
        result = Py_NewRef(x);
    } else if (gives && !out) {
        result = make(quick, row, source.object);
        if (!result) return nullptr;
        target.data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(result));
    } else {
        if (!arguments.read(out, target, true)) return not_plain();
        if (gives && (target.count != expected || target.dtype != source.dtype)) return not_plain();
        if (!gives) {
            count = target.count;
            source.dtype = target.dtype;
        }
        result = Py_NewRef(out);
    }
    if (run(quick, [&] {
            return rc_collective(quick.comm, row.collective, source.data, target.data, count, source.dtype, op, 1.0,
                                 root, nullptr, -1.0, nullptr);
        })) {
        return result;
    }
    Py_DECREF(result);
    return nullptr;
}

PyObject* barrier(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Quick& quick = *reinterpret_cast<Quick*>(self);
    if (!Arguments(quick, values, number).nothing_else()) return not_plain();
    const bool done = run(quick, [&] {
        return rc_collective(quick.comm, RC_BARRIER, nullptr, nullptr, 0, 0, 0, 1.0, 0, nullptr, -1.0, nullptr);
    });
    return done ? Py_NewRef(Py_None) : nullptr;
}

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Quick& quick = *reinterpret_cast<Quick*>(self);
    Arguments given(quick, values, number);
    Array x;
    int peer;
    int64_t tag;
    if (!given.array(x, false) || !given.rank(peer) || !given.tag(tag) || !given.nothing_else()) return not_plain();
    const bool done =
        run(quick, [&] { return rc_send(quick.comm, x.data, x.count, x.dtype, peer, tag, -1.0, nullptr); });
    return done ? Py_NewRef(Py_None) : nullptr;
}

PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Quick& quick = *reinterpret_cast<Quick*>(self);
    Arguments given(quick, values, number);
    Array x;
    int peer, from;
    int64_t tag;
    if (!given.array(x, true) || !given.source(peer) || !given.tag(tag) || !given.nothing_else()) return not_plain();
    const bool done =
        run(quick, [&] { return rc_recv(quick.comm, x.data, x.count, x.dtype, peer, tag, -1.0, &from, nullptr); });
    return done ? PyLong_FromLong(from) : nullptr;
}

PyObject* sendrecv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Quick& quick = *reinterpret_cast<Quick*>(self);
    Arguments given(quick, values, number);
    Array x, out;
    int dest, source, from;
    int64_t tag;
    if (!given.array(x, false) || !given.rank(dest) || !given.array(out, true) || !given.source(source) ||
        !given.tag(tag) || !given.nothing_else()) {
        return not_plain();
    }
    const bool done = run(quick, [&] {
        return rc_sendrecv(quick.comm, x.data, x.count, x.dtype, dest, out.data, out.count, out.dtype, source, tag,
                           -1.0, &from);
    });
    return done ? PyLong_FromLong(from) : nullptr;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *address, *handle, *check, *dtypes, *ops;
    int rank, size;
    if (!PyArg_ParseTuple(arguments, "O!OOO!O!ii", &PyLong_Type, &address, &handle, &check, &PyDict_Type, &dtypes,
                          &PyDict_Type, &ops, &rank, &size)) {
        return nullptr;
    }
    auto* const alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    auto* const quick = reinterpret_cast<Quick*>(alloc(type, 0));  // all zero
    if (!quick) return nullptr;
    quick->comm = static_cast<rc_comm*>(PyLong_AsVoidPtr(address));
    quick->handle = Py_NewRef(handle);
    quick->check = Py_NewRef(check);
    quick->dtypes.dict = Py_NewRef(dtypes);
    quick->ops.dict = Py_NewRef(ops);
    quick->rank = rank;
    quick->size = size;
    return &quick->object;
}

void destroy(PyObject* self) {
    const Quick& quick = *reinterpret_cast<Quick*>(self);
    for (const Codes& codes : {quick.dtypes, quick.ops}) {
        Py_DECREF(codes.dict);
        Py_XDECREF(codes.last);
    }
    Py_DECREF(quick.handle);
    Py_DECREF(quick.check);
    PyTypeObject* const type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

using Method = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, Method function) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method("barrier", barrier),
    method("broadcast", collective<broadcast>),
    method("reduce", collective<reduce>),
    method("all_reduce", collective<all_reduce>),
    method("gather", collective<gather>),
    method("scatter", collective<scatter>),
    method("all_gather", collective<all_gather>),
    method("reduce_scatter", collective<reduce_scatter>),
    method("all_to_all", collective<all_to_all>),
    method("send", send),
    method("recv", recv),
    method("sendrecv", sendrecv),
    {},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._quick.Quick", sizeof(Quick), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};

int fill(PyObject* module) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
    if (!type) return -1;
    const int added = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    return added;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {}};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "_quick", nullptr, 0, nullptr, module_slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__quick(void) { return PyModuleDef_Init(&definition); }
