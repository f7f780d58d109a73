// NumPy arrays and PyTorch tensors as the fast path reads and makes them.
#pragma once
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ringcomm_numpy  // one table for all files of the module
#include <numpy/arrayobject.h>

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "ringcomm.h"

namespace ringcomm {

constexpr int MOST_AXES = 32;            // of NumPy 1; arrays with more take the general path
constexpr int WARN_ON_WRITE = 1u << 31;  // missing from NumPy's headers

// An exact int that fits into a C int.
inline bool small(PyObject* number, int& value) {
    if (!number || !PyLong_CheckExact(number)) return false;
    int overflow;
    const long found = PyLong_AsLongAndOverflow(number, &overflow);
    value = int(found);
    return !overflow && found == value;
}

// A dict from objects to codes, with the last lookup cached.
struct Codes {
    PyObject *dict, *last;
    int last_code;

    bool find(PyObject* thing, int& code) {
        if (thing != last) {
            PyObject* found = PyDict_GetItemWithError(dict, thing);
            if (!found) PyErr_Clear();  // the general path raises the error
            if (!small(found, code)) return false;
            Py_XDECREF(std::exchange(last, Py_NewRef(thing)));
            last_code = code;
        }
        code = last_code;
        return true;
    }
};

struct Array {
    PyArrayObject* numpy = nullptr;  // nullptr for a tensor, and on a GPU
    void* data = nullptr;
    uint64_t count = 0;
    int dtype = 0;
    PyObject* on_gpu = nullptr;  // see GpuArrays; nullptr: in host memory

    uint64_t bytes() const { return count * uint64_t(rc_dtype_bytes(dtype)); }
    void fill(rc_transfer& transfer) const {
        transfer.data = data;
        transfer.count = count;
        transfer.dtype = dtype;
        transfer.on_gpu = on_gpu != nullptr;
    }
};

// What arrays are asked that have no C interface: tensors, since none is shared by all supported versions of PyTorch,
// and CuPy's.
inline struct Names {
    PyObject *is_cpu, *is_nested, *is_contiguous, *is_conj, *is_neg, *data_ptr, *numel, *dtype, *shape, *new_empty;
    PyObject *is_cuda, *get_device, *data, *ptr, *device_id, *size, *_c_contiguous;

    // False: the exception is set.
    bool intern() {
        for (auto [name, text] : std::initializer_list<std::pair<PyObject**, const char*>>{
                 {&is_cpu, "is_cpu"},
                 {&is_nested, "is_nested"},
                 {&is_contiguous, "is_contiguous"},
                 {&is_conj, "is_conj"},
                 {&is_neg, "is_neg"},
                 {&data_ptr, "data_ptr"},
                 {&numel, "numel"},
                 {&dtype, "dtype"},
                 {&shape, "shape"},
                 {&new_empty, "new_empty"},
                 {&is_cuda, "is_cuda"},
                 {&get_device, "get_device"},
                 {&data, "data"},
                 {&ptr, "ptr"},
                 {&device_id, "device_id"},
                 {&size, "size"},
                 {&_c_contiguous, "_c_contiguous"},
             }) {
            *name = PyUnicode_InternFromString(text);
            if (!*name) return false;
        }
        return true;
    }
} names;

// Answers of Python objects. These take the reference of an answer, which is nullptr if the object raised.
inline PyObject* ask(PyObject* object, PyObject* name) { return PyObject_CallMethodObjArgs(object, name, nullptr); }
inline bool is(PyObject* answer, PyObject* expected) {
    Py_XDECREF(answer);  // True and False remain
    return answer == expected;
}
inline bool number(PyObject* answer, uint64_t& value) {
    value = answer ? PyLong_AsUnsignedLongLong(answer) : 0;
    Py_XDECREF(answer);
    return answer && !PyErr_Occurred();
}
inline bool code(PyObject* dtype, Codes& dtypes, int& value) {
    const bool known = dtype && dtypes.find(dtype, value);
    Py_XDECREF(dtype);
    return known;
}

// Reads arrays whose memory the core can use as it is. The caller keeps the set and the dict alive.
struct ArrayReader {
    PyObject* tensors;  // the set of PyTorch's types
    Codes dtypes;       // NumPy's and PyTorch's seen so far

    // Reads an array in host memory.
    bool read(PyObject* given, Array& array, bool writable) {
        if (PyArray_CheckExact(given)) return read_numpy(reinterpret_cast<PyArrayObject*>(given), array, writable);
        const bool plain = PySet_Contains(tensors, reinterpret_cast<PyObject*>(Py_TYPE(given))) == 1 &&
                           is(PyObject_GetAttr(given, names.is_cpu), Py_True) && read_tensor(given, array);
        if (!plain) PyErr_Clear();  // the general path raises the error
        return plain;
    }

    bool read_numpy(PyArrayObject* given, Array& array, bool writable) {
        const int flags = PyArray_FLAGS(given);
        if (!(flags & NPY_ARRAY_C_CONTIGUOUS)) return false;
        if (writable && (!(flags & NPY_ARRAY_WRITEABLE) || flags & WARN_ON_WRITE)) return false;
        array = {given, PyArray_DATA(given), uint64_t(PyArray_SIZE(given))};
        return dtypes.find(reinterpret_cast<PyObject*>(PyArray_DESCR(given)), array.dtype);
    }

    // Reads a NumPy array of any dtype that is known.
    bool read_bytes(PyObject* given, Array& array, bool writable) {
        if (!PyArray_CheckExact(given) || !read_numpy(reinterpret_cast<PyArrayObject*>(given), array, writable)) {
            return false;
        }
        array.count = array.bytes();
        array.dtype = RC_UINT8;
        return true;
    }

    bool read_tensor(PyObject* given, Array& array) {
        if (!is(PyObject_GetAttr(given, names.is_nested), Py_False)) return false;
        if (!is(ask(given, names.is_contiguous), Py_True)) return false;
        if (!is(ask(given, names.is_conj), Py_False) || !is(ask(given, names.is_neg), Py_False)) return false;
        uint64_t address;
        if (!number(ask(given, names.data_ptr), address) || !number(ask(given, names.numel), array.count)) return false;
        if (!address && array.count) return false;
        array.data = reinterpret_cast<void*>(address);
        return code(PyObject_GetAttr(given, names.dtype), dtypes, array.dtype);
    }
};

// The length of the first axis; -1: there is none.
inline Py_ssize_t rows_of(PyObject* x) {
    const Py_ssize_t rows = PyObject_Size(x);
    if (rows < 0) PyErr_Clear();
    return rows;
}

inline bool is_divisible(Py_ssize_t rows, int ranks) { return rows >= 0 && rows % ranks == 0; }

// Allocates an array like x, with another first axis of `rows`, or, if `added`, with one more axis before the first.
// nullptr: the exception is set.
inline PyObject* make_numpy(PyArrayObject* x, Py_ssize_t rows, bool added) {
    const int axes = PyArray_NDIM(x);
    npy_intp shape[MOST_AXES + 1];
    for (int axis = 0; axis < axes; ++axis) shape[axis + added] = PyArray_DIM(x, axis);
    shape[0] = rows;
    PyArray_Descr* dtype = PyArray_DESCR(x);
    Py_INCREF(reinterpret_cast<PyObject*>(dtype));  // PyArray_Empty steals it
    return PyArray_Empty(axes + added, shape, dtype, false);
}

// The same by `x.new_empty(shape)`, or by `maker(x, shape)`.
inline PyObject* make_array(PyObject* x, Py_ssize_t rows, bool added, PyObject* maker) {
    PyObject* const size = PyObject_GetAttr(x, names.shape);
    PyObject* const shape = size ? PySequence_List(size) : nullptr;
    PyObject* const first = PyLong_FromSsize_t(rows);
    const bool changed =
        shape && first && !PyList_SetSlice(shape, 0, !added, nullptr) && !PyList_Insert(shape, 0, first);
    PyObject* made = nullptr;
    if (changed) {
        made = maker ? PyObject_CallFunctionObjArgs(maker, x, shape, nullptr)
                     : PyObject_CallMethodObjArgs(x, names.new_empty, shape, nullptr);
    }
    Py_XDECREF(size);
    Py_XDECREF(shape);
    Py_XDECREF(first);
    return made;
}

}  // namespace ringcomm
