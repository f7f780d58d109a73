// Arrays on the GPU of a group, as the fast path reads them, and the current stream.
#pragma once
#include "calls.h"
#include "fast_arrays.h"

namespace ringcomm {

// The arrays of one GPU, once it is connected.
struct GpuArrays {
    // How arrays of a type are read. CUPY: by attributes of CuPy's arrays; EMULATED: NumPy arrays of a subclass.
    enum Kind { TENSOR, CUPY, EMULATED };

    // A dict from types to (kind, current, maker). current(ordinal) returns the current stream: a number, or an object
    // with it as `ptr`. maker(x, shape) returns a new array like x; None: x.new_empty(shape). nullptr: not connected.
    PyObject* types;
    int ordinal;

    // The Python objects of a dict and an ordinal. False: the exception is set.
    bool connect(PyObject* dict, PyObject* number) {
        if (!PyDict_Check(dict) || !small(number, ordinal)) {
            PyErr_Format(PyExc_TypeError, "expected a dict and an ordinal");
            return false;
        }
        Py_XDECREF(std::exchange(types, Py_NewRef(dict)));
        return true;
    }
    void disconnect() { Py_XDECREF(std::exchange(types, nullptr)); }

    // False: no array on this GPU, or one that only the general path reads.
    bool read(ArrayReader& reader, PyObject* given, Array& array, bool writable) const {
        PyObject* const row =
            types ? PyDict_GetItemWithError(types, reinterpret_cast<PyObject*>(Py_TYPE(given))) : nullptr;
        int kind;
        const bool plain = row && small(PyTuple_GetItem(row, 0), kind) && read(reader, kind, given, array, writable);
        if (!plain) PyErr_Clear();
        array.on_gpu = row;
        return plain;
    }

    // As `current` of current_stream.
    static PyObject* current(const Array& array) { return PyTuple_GetItem(array.on_gpu, 1); }

    // As `maker` of make_array.
    static PyObject* maker(const Array& array) {
        PyObject* const maker = PyTuple_GetItem(array.on_gpu, 2);
        return maker == Py_None ? nullptr : maker;
    }

private:
    bool read(ArrayReader& reader, int kind, PyObject* given, Array& array, bool writable) const {
        if (kind == EMULATED) {
            if (!reader.read_numpy(reinterpret_cast<PyArrayObject*>(given), array, writable)) return false;
            array.numpy = nullptr;
            return true;
        }
        if (kind == TENSOR) {
            return is(PyObject_GetAttr(given, names.is_cuda), Py_True) && is_here(ask(given, names.get_device)) &&
                   reader.read_tensor(given, array);
        }
        if (!is(PyObject_GetAttr(given, names._c_contiguous), Py_True)) return false;
        if (!number(PyObject_GetAttr(given, names.size), array.count)) return false;
        PyObject* const memory = PyObject_GetAttr(given, names.data);
        uint64_t address;
        const bool here = memory && is_here(PyObject_GetAttr(memory, names.device_id)) &&
                          number(PyObject_GetAttr(memory, names.ptr), address);
        Py_XDECREF(memory);
        if (!here) return false;
        array.data = reinterpret_cast<void*>(address);
        return code(PyObject_GetAttr(given, names.dtype), reader.dtypes, array.dtype);
    }

    bool is_here(PyObject* answer) const {
        int found;
        const bool here = answer && small(answer, found) && found == ordinal;
        Py_XDECREF(answer);
        return here;
    }
};

}  // namespace ringcomm
