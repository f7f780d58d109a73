// The records in which pickled objects travel: ringcomm/objects.py makes and reads the same.
#pragma once
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace ringcomm {

struct ObjectRecord {
    int64_t size;     // of the pickled object; -1: it could not be pickled
    int64_t longest;  // of those that the rank sends
    char data[496];   // none if the object is longer

    bool has_data() const { return size >= 0 && longest <= int64_t(sizeof data); }

    // `pickled` is an object of type bytes, or None.
    void pack(PyObject* pickled) {
        size = longest = pickled == Py_None ? -1 : PyBytes_Size(pickled);
        memset(data, 0, sizeof data);
        if (size > 0 && has_data()) memcpy(data, PyBytes_AsString(pickled), size);
    }
};

// Returns a pair of lists: the pickled objects, and None; or, if a record has none, None and the sizes.
inline PyObject* unpack(const std::vector<ObjectRecord>& records) {
    bool complete = true;
    for (const ObjectRecord& record : records) complete &= record.has_data();
    PyObject* const list = PyList_New(Py_ssize_t(records.size()));
    for (size_t rank = 0; list && rank < records.size(); ++rank) {
        const ObjectRecord& record = records[rank];
        PyObject* const item =
            complete ? PyBytes_FromStringAndSize(record.data, record.size) : PyLong_FromLongLong(record.size);
        if (!item) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SetItem(list, Py_ssize_t(rank), item);
    }
    if (!list) return nullptr;
    return complete ? Py_BuildValue("(NO)", list, Py_None) : Py_BuildValue("(ON)", Py_None, list);
}

}  // namespace ringcomm
