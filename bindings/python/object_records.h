// Pickled objects, and the records of fixed size in which small ones travel.
#pragma once
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace ringcomm {

// Pickles, unpickles: a tuple of Python functions, and of the protocol for the first one, None if it takes none.
struct Codec {
    PyObject *dumps, *protocol, *loads;  // borrowed

    bool read(PyObject* tuple) {
        if (!tuple || !PyTuple_Check(tuple) || PyTuple_Size(tuple) != 3) return false;
        dumps = PyTuple_GetItem(tuple, 0);
        protocol = PyTuple_GetItem(tuple, 1);
        loads = PyTuple_GetItem(tuple, 2);
        return true;
    }
    PyObject* dump(PyObject* object) const {
        return PyObject_CallFunctionObjArgs(dumps, object, protocol == Py_None ? nullptr : protocol, nullptr);
    }
    PyObject* load(PyObject* bytes) const { return PyObject_CallFunctionObjArgs(loads, bytes, nullptr); }
};

// From here on to send an array by itself takes less than copies into the pickle and out of it.
constexpr size_t LARGE_BYTES = 64 << 10;

// As long as what fits a start record (memory/layout.h), so that who only gives an object need not wait.
struct ObjectRecord {
    int64_t size;     // of the pickled object; -1: it could not be pickled
    int64_t longest;  // of those that the rank sends
    char data[464];   // none if the object is longer

    bool has_data() const { return 0 <= size && size <= longest && longest <= int64_t(sizeof data); }

    PyObject* pickled() const { return PyBytes_FromStringAndSize(data, Py_ssize_t(size)); }

    PyObject* load(const Codec& codec) const {
        PyObject* const bytes = pickled();
        PyObject* const object = bytes ? codec.load(bytes) : nullptr;
        Py_XDECREF(bytes);
        return object;
    }

    // False: the exception is set.
    bool write(PyObject* pickled) {
        Py_buffer view;
        if (PyObject_GetBuffer(pickled, &view, PyBUF_SIMPLE)) return false;  // it is no bytes
        size = view.len;
        if (size && size <= int64_t(sizeof data)) memcpy(data, view.buf, size_t(size));
        PyBuffer_Release(&view);
        return true;
    }
};

// The objects that a rank sends, pickled. If pickling one fails, its records tell, and `error` is the reason.
class SentObjects {
public:
    std::vector<ObjectRecord> records;
    PyObject* error = nullptr;

    SentObjects() = default;
    SentObjects(const SentObjects&) = delete;
    ~SentObjects() {
        Py_XDECREF(error);
        for (PyObject* each : pickled_) Py_XDECREF(each);
    }

    // `next(i)` returns object i, an owned reference; nullptr: the exception is set.
    template <class Next>
    void pickle(const Codec& codec, size_t count, Next next) {
        records.resize(count);
        pickled_.resize(count);
        int64_t longest = -1;
        for (size_t i = 0; i < count; ++i) {
            PyObject* const object = next(i);
            pickled_[i] = object ? codec.dump(object) : nullptr;
            Py_XDECREF(object);
            if (!pickled_[i] || !records[i].write(pickled_[i])) return fail();
            longest = std::max(longest, records[i].size);
        }
        for (ObjectRecord& record : records) record.longest = longest;
    }

    // A list of the pickled objects; of None, if pickling has failed.
    PyObject* pickled() const {
        PyObject* const list = PyList_New(Py_ssize_t(pickled_.size()));
        for (size_t i = 0; list && i < pickled_.size(); ++i) {
            PyList_SetItem(list, Py_ssize_t(i), pickled(i));
        }
        return list;
    }
    PyObject* pickled(size_t i) const { return Py_NewRef(error ? Py_None : pickled_[i]); }

private:
    // The other ranks are in the call: the error waits until it is done, also if it ends the program.
    void fail() {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback) PyException_SetTraceback(error, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        for (ObjectRecord& record : records) record = {-1, -1, {}};
    }

    std::vector<PyObject*> pickled_;
};

// Returns a list with what `item` makes of each record, an owned reference; nullptr: the exception is set.
template <class Item>
PyObject* list_of(const std::vector<ObjectRecord>& records, Item item) {
    PyObject* const list = PyList_New(Py_ssize_t(records.size()));
    for (size_t i = 0; list && i < records.size(); ++i) {
        PyObject* const made = item(records[i]);
        if (!made) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SetItem(list, Py_ssize_t(i), made);
    }
    return list;
}

// Whether all objects have come. All ranks see alike whether a second call follows. No rank unpickles before it, since
// that may fail on one of them.
inline bool have_data(const std::vector<ObjectRecord>& records) {
    return std::ranges::all_of(records, [](const ObjectRecord& each) { return each.has_data(); });
}

inline PyObject* load_all(const std::vector<ObjectRecord>& records, const Codec& codec) {
    return list_of(records, [&](const ObjectRecord& each) { return each.load(codec); });
}

// None for those that have no data.
inline PyObject* pickled_of(const std::vector<ObjectRecord>& records) {
    return list_of(records,
                   [](const ObjectRecord& each) { return each.has_data() ? each.pickled() : Py_NewRef(Py_None); });
}

inline PyObject* sizes_of(const std::vector<ObjectRecord>& records) {
    return list_of(records, [](const ObjectRecord& each) { return PyLong_FromLongLong(each.size); });
}

}  // namespace ringcomm
