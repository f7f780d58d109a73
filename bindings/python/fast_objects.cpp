// The collectives and messages of Python objects: pickling, a call of the core, and unpickling in one.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include "fast_path.h"
#include "object_records.h"

namespace ringcomm {

namespace {

using Records = std::vector<ObjectRecord>;

// Where objects.py looks for large arrays: enough for a dict of layers or of columns, and little in a small call.
constexpr int MOST_NESTED = 3, MOST_ITEMS = 64;

bool holds_large_array(PyObject* object, int nested = 0) {
    if (PyArray_CheckExact(object)) {
        auto* const array = reinterpret_cast<PyArrayObject*>(object);
        const bool contiguous = PyArray_FLAGS(array) & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS);
        return contiguous && PyArray_NBYTES(array) >= npy_intp(LARGE_BYTES) && !PyDataType_REFCHK(PyArray_DESCR(array));
    }
    if (nested == MOST_NESTED) return false;
    if (PyDict_CheckExact(object)) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        for (int i = 0; i < MOST_ITEMS && PyDict_Next(object, &at, &key, &value); ++i) {
            if (holds_large_array(value, nested + 1)) return true;
        }
        return false;
    }
    const bool list = PyList_CheckExact(object);
    if (!list && !PyTuple_CheckExact(object)) return false;
    const Py_ssize_t items = std::min<Py_ssize_t>(PyObject_Size(object), MOST_ITEMS);
    for (Py_ssize_t i = 0; i < items; ++i) {
        if (holds_large_array(list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i), nested + 1)) return true;
    }
    return false;
}

// Pickles the objects in a list. Pickling one may run code that shortens it.
void pickle_all(SentObjects& sent, const Codec& codec, PyObject* list) {
    sent.pickle(codec, size_t(PyList_Size(list)), [&](size_t i) {
        PyObject* const object = PyList_GetItem(list, Py_ssize_t(i));
        return object ? Py_NewRef(object) : nullptr;
    });
}

// The pickled objects that the root of a gather has by now, None for the others.
PyObject* arrived(const Records& records, const SentObjects& sent, int root) {
    PyObject* const list = pickled_of(records);
    if (list) PyList_SetItem(list, root, sent.pickled(0));
    return list;
}

}  // namespace

template <int code>
PyObject* object_collective(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    constexpr Collective row = collectives[code];
    constexpr bool divides = row.given == Data::BLOCKS, joins = row.got == Data::BLOCKS;
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments arguments(fast_path, values, number);
    PyObject *given, *functions, *timeout;
    Codec codec;
    int root = 0;
    if (fast_path.deferred || !arguments.object(given)) return not_plain();
    if (row.rooted() && !arguments.rank(root)) return not_plain();
    if (!arguments.object(functions) || !codec.read(functions)) return not_plain();
    if (!arguments.object(timeout) || timeout) return not_plain();

    const int rank = fast_path.rank, size = fast_path.size;
    if (code == RC_BROADCAST && rank == root && holds_large_array(values[0])) return not_plain();
    SentObjects sent;
    if (row.gives(rank, root) && divides) {
        if (!given || !PyList_CheckExact(given) || PyList_Size(given) != size) return not_plain();
        pickle_all(sent, codec, given);
    } else if (row.gives(rank, root)) {
        sent.pickle(codec, 1, [&](size_t) { return Py_NewRef(values[0]); });
    }
    const bool keeps_own = code == RC_BROADCAST && rank == root, only_gives = keeps_own || !row.gets(rank, root);
    Records received(only_gives ? 0 : joins ? size : 1);
    Records& records = only_gives ? sent.records : received;
    int32_t late = 0;  // whether a mismatch of an earlier call is known
    void* const target = row.gets(rank, root) ? records.data() : nullptr;
    const rc_call call{sent.records.data(), target, sizeof(ObjectRecord), RC_UINT8, 0, 1.0, root, nullptr, &late};
    PyObject* const done = run(fast_path, Py_NewRef(Py_None), size * sizeof(ObjectRecord),
                               [&] { return rc_collective(fast_path.comm, code, &call, OWN_TIMEOUT, nullptr); });
    if (done != Py_None) return done;
    Py_DECREF(done);
    if (!have_data(records)) {
        PyObject* const pickled = code == RC_GATHER && rank == root ? arrived(records, sent, root) : sent.pickled();
        PyObject* const sizes = pickled ? sizes_of(records) : nullptr;
        PyObject* const error = sent.error ? sent.error : Py_None;
        if (sizes) return Py_BuildValue("(O(NON)N)", Py_None, pickled, error, sizes, PyBool_FromLong(late));
        Py_XDECREF(pickled);
        return nullptr;
    }
    PyObject* found;
    if (!row.gets(rank, root)) {
        found = Py_NewRef(Py_None);
    } else if (keeps_own) {
        found = Py_NewRef(values[0]);
    } else {
        found = joins ? load_all(records, codec) : records[0].load(codec);
    }
    return found ? Py_BuildValue("(NON)", found, Py_None, PyBool_FromLong(late)) : nullptr;
}

template PyObject* object_collective<RC_BROADCAST>(PyObject*, PyObject* const*, Py_ssize_t);
template PyObject* object_collective<RC_GATHER>(PyObject*, PyObject* const*, Py_ssize_t);
template PyObject* object_collective<RC_SCATTER>(PyObject*, PyObject* const*, Py_ssize_t);
template PyObject* object_collective<RC_ALL_GATHER>(PyObject*, PyObject* const*, Py_ssize_t);
template PyObject* object_collective<RC_ALL_TO_ALL>(PyObject*, PyObject* const*, Py_ssize_t);

PyObject* pack_objects(PyObject*, PyObject* const* values, Py_ssize_t number) {
    Codec codec;
    if (number != 2 || !PyList_CheckExact(values[0]) || !codec.read(values[1])) {
        return PyErr_Format(PyExc_TypeError, "pack_objects takes a list and a codec");
    }
    SentObjects sent;
    pickle_all(sent, codec, values[0]);
    const auto* const records = reinterpret_cast<const char*>(sent.records.data());
    const size_t bytes = sent.records.size() * sizeof(ObjectRecord);
    return Py_BuildValue("(NNO)", PyBytes_FromStringAndSize(records, Py_ssize_t(bytes)), sent.pickled(),
                         sent.error ? sent.error : Py_None);
}

PyObject* open_objects(PyObject*, PyObject* const* values, Py_ssize_t number) {
    Codec codec;
    const bool loads = number == 2 && codec.read(values[1]);
    if (number != 2 || !PyBytes_Check(values[0]) || !(loads || values[1] == Py_None)) {
        return PyErr_Format(PyExc_TypeError, "open_objects takes bytes, and a codec or None");
    }
    Records records(size_t(PyBytes_Size(values[0])) / sizeof(ObjectRecord));
    memcpy(records.data(), PyBytes_AsString(values[0]), records.size() * sizeof(ObjectRecord));
    if (!have_data(records)) return Py_BuildValue("(NN)", pickled_of(records), sizes_of(records));
    return loads ? Py_BuildValue("(NO)", load_all(records, codec), Py_None) : Py_BuildValue("(OO)", Py_None, Py_None);
}

PyObject* has_large_array(PyObject*, PyObject* const* values, Py_ssize_t number) {
    if (number != 1) return PyErr_Format(PyExc_TypeError, "has_large_array takes an object");
    return PyBool_FromLong(holds_large_array(values[0]));
}

PyObject* send_object(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Arguments arguments(fast_path, values, number);
    PyObject *object, *functions;
    Codec codec;
    rc_transfer sent = transfer_of(RC_SEND);
    if (!arguments.object(object) || !arguments.rank(sent.peer) || !arguments.tag(sent.tag)) return not_plain();
    if (!arguments.object(functions) || !codec.read(functions)) return not_plain();
    PyObject* const pickled = codec.dump(values[0]);
    Py_buffer view;
    if (!pickled || PyObject_GetBuffer(pickled, &view, PyBUF_SIMPLE)) {
        Py_XDECREF(pickled);
        return nullptr;
    }
    set_bytes(sent, view.buf, uint64_t(view.len));
    PyObject* const done =
        run(fast_path, Py_NewRef(Py_None), sent.count, [&] { return rc_transfer_run(fast_path.comm, &sent, nullptr); });
    PyBuffer_Release(&view);
    Py_DECREF(pickled);
    return done;
}

// Never NotImplemented, which may be the object.
PyObject* recv_object(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    const FastPath& fast_path = *reinterpret_cast<FastPath*>(self);
    Codec codec;
    int peer;
    if (number != 3 || !small(values[0], peer) || !PyLong_CheckExact(values[1]) || !codec.read(values[2])) {
        return PyErr_Format(PyExc_TypeError, "recv_object takes a rank, a tag and a codec");
    }
    const int64_t tag = PyLong_AsLongLong(values[1]);
    if (PyErr_Occurred()) return nullptr;
    rc_message message;
    PyObject* const bytes = receive_bytes(fast_path.comm, fast_path.check, peer, tag, message);
    if (!bytes) return nullptr;
    PyObject* const object = message.bytes ? codec.load(bytes) : Py_NewRef(Py_None);
    Py_DECREF(bytes);
    return object;
}

}  // namespace ringcomm
