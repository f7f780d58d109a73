// The messages of Communicator.messages: from Python's buffer protocol straight into the core.
//
// Another module in the library of ringcomm._native, because it must share the core's state. MessageArguments are
// positional; ringcomm/transports/messages.py documents them.
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include "started_call.h"

using namespace ringcomm;

namespace {

// The Python objects.
struct Messages : CallOwner {
    PyObject* refuse;        // raises the error of memory that cannot be used
    PyTypeObject* envelope;  // the tuple of a source, a tag and a size
};

using MessageWork = StartedCall;

// At the beginning of each method.
Messages& messages_of(PyObject* self) {
    auto& messages = *reinterpret_cast<Messages*>(self);
    messages.sweep();
    return messages;
}

// The memory of an object.
class Memory {
public:
    ~Memory() { PyBuffer_Release(&view_); }  // does nothing after take()

    // False: the exception is set.
    bool read(const Messages& messages, PyObject* object, bool writable) {
        const bool has_objects =
            PyArray_Check(object) && PyDataType_REFCHK(PyArray_DESCR(reinterpret_cast<PyArrayObject*>(object)));
        if (!has_objects && PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0)
            return true;
        PyErr_Clear();
        Py_XDECREF(PyObject_CallFunction(messages.refuse, "O", object));
        return false;
    }
    // Gives the memory away, but still tells what it is.
    Py_buffer take() {
        const Py_buffer taken = view_;
        view_.obj = nullptr;
        return taken;
    }

    void* data() const { return view_.buf; }
    uint64_t bytes() const { return uint64_t(view_.len); }

private:
    Py_buffer view_{};
};

// The positional arguments. Each function takes the next one, and returns false if it has set the exception.
class MessageArguments {
public:
    MessageArguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected, Py_ssize_t optional = 0)
        : next_(values), end_(values + count), complete_(count >= expected && count <= expected + optional) {
        if (!complete_) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    }

    bool memory(const Messages& messages, Memory& memory, bool writable) {
        return complete_ && memory.read(messages, *next_++, writable);
    }
    bool rank(int& rank) {
        int64_t value;
        if (!number(value)) return false;
        rank = int(value);
        if (rank == value) return true;
        PyErr_Format(PyExc_OverflowError, "expected a rank, got %lld", static_cast<long long>(value));
        return false;
    }
    bool number(int64_t& value) {
        if (!complete_) return false;
        value = PyLong_AsLongLong(*next_++);
        return value != -1 || !PyErr_Occurred();
    }
    // False by default.
    bool flag(bool& flag) {
        const int value = !complete_ ? -1 : next_ == end_ ? 0 : PyObject_IsTrue(*next_++);
        flag = value == 1;
        return value >= 0;
    }

private:
    PyObject* const* next_;
    PyObject* const* const end_;
    const bool complete_;
};

PyObject* none_or_raise(const Messages& messages, int status) {
    return status == RC_OK ? Py_NewRef(Py_None) : raise(messages.check, status);
}

PyObject* make_envelope(const Messages& messages, const rc_message& message) {
    // The constructor of tuple, not that of the subclass, which is written in Python.
    static auto* const create = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    PyObject* const fields = fields_of(message);
    PyObject* const arguments = fields ? PyTuple_Pack(1, fields) : nullptr;
    PyObject* const envelope = arguments ? create(messages.envelope, arguments, nullptr) : nullptr;
    Py_XDECREF(fields);
    Py_XDECREF(arguments);
    return envelope;
}

PyObject* envelope_or_raise(const Messages& messages, int status, const rc_message& message) {
    return status == RC_OK ? make_envelope(messages, message) : raise(messages.check, status);
}

PyObject* received(MessageWork& work) {
    rc_message message;
    const int status = rc_work_message(work.pending.work, &message);
    return envelope_or_raise(static_cast<const Messages&>(*work.owner), status, message);
}

// Starts a transfer that uses the memory.
template <class Call>
PyObject* start(Messages& messages, Memory& memory, Call call) {
    auto* const work = allocate<MessageWork>(messages.call_type);
    if (!work) return nullptr;
    work->outcome = received;
    const uint64_t bytes = memory.bytes();
    const int status = work->start(messages, {memory.take(), nullptr, nullptr}, nullptr, bytes, call);
    if (status == RC_OK) return &work->object;
    Py_DECREF(&work->object);
    return raise(messages.check, status);
}

// --- Methods of Messages ---------------------------------------------------------------------------------------------

int send_as(bool synchronous, const Messages& messages, const Memory& memory, int peer, int64_t tag, rc_work** work) {
    auto* const send = synchronous ? rc_send_synchronous : rc_send;
    return send(messages.comm, memory.data(), memory.bytes(), RC_UINT8, peer, tag, OWN_TIMEOUT, work);
}

struct Outgoing {
    Memory memory;
    int peer;
    int64_t tag;
    bool synchronous;

    bool read(const Messages& messages, MessageArguments arguments) {
        return arguments.memory(messages, memory, false) && arguments.rank(peer) && arguments.number(tag) &&
               arguments.flag(synchronous);
    }
};

struct Incoming {
    Memory memory;
    int peer;
    int64_t tag, taken;

    bool read(const Messages& messages, MessageArguments arguments) {
        return arguments.memory(messages, memory, true) && arguments.rank(peer) && arguments.number(tag) &&
               arguments.number(taken);
    }
    int receive(const Messages& messages, rc_message* message, rc_work** work) const {
        return rc_recv_message(messages.comm, memory.data(), memory.bytes(), peer, tag, uint64_t(taken), OWN_TIMEOUT,
                               message, work);
    }
};

PyObject* send(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    Outgoing sent;
    if (!sent.read(messages, {values, number, 3, 1})) return nullptr;
    return none_or_raise(messages, run_core(sent.memory.bytes(), [&] {
                             return send_as(sent.synchronous, messages, sent.memory, sent.peer, sent.tag, nullptr);
                         }));
}

PyObject* isend(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    Outgoing sent;
    if (!sent.read(messages, {values, number, 3, 1})) return nullptr;
    return start(messages, sent.memory, [&](rc_work** work) {
        return send_as(sent.synchronous, messages, sent.memory, sent.peer, sent.tag, work);
    });
}

PyObject* recv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    Incoming received;
    if (!received.read(messages, {values, number, 4})) return nullptr;
    rc_message message;
    const int status = run_core(received.memory.bytes(), [&] { return received.receive(messages, &message, nullptr); });
    return envelope_or_raise(messages, status, message);
}

PyObject* irecv(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    Incoming received;
    if (!received.read(messages, {values, number, 4})) return nullptr;
    return start(messages, received.memory, [&](rc_work** work) { return received.receive(messages, nullptr, work); });
}

PyObject* recv_bytes(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    MessageArguments arguments(values, number, 2);
    int peer;
    int64_t tag;
    if (!arguments.rank(peer) || !arguments.number(tag)) return nullptr;
    rc_message message;
    PyObject* const bytes = receive_bytes(messages.comm, messages.check, peer, tag, message);
    PyObject* const envelope = bytes ? make_envelope(messages, message) : nullptr;
    if (envelope) return Py_BuildValue("(NN)", bytes, envelope);
    Py_XDECREF(bytes);
    return nullptr;
}

PyObject* probe(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    MessageArguments arguments(values, number, 4);
    int peer, found;
    int64_t tag;
    bool waits, takes;
    if (!arguments.rank(peer) || !arguments.number(tag) || !arguments.flag(waits) || !arguments.flag(takes)) {
        return nullptr;
    }
    rc_message message;
    uint64_t taken = 0;
    const int status = without_gil([&] {
        return rc_probe(messages.comm, peer, tag, waits, OWN_TIMEOUT, &found, &message, takes ? &taken : nullptr);
    });
    if (status != RC_OK) return raise(messages.check, status);
    if (!found) return Py_NewRef(Py_None);
    PyObject* const envelope = make_envelope(messages, message);
    return envelope ? Py_BuildValue("(NK)", envelope, static_cast<unsigned long long>(taken)) : nullptr;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *address, *handle, *check, *refuse, *envelope, *work_type;
    if (!PyArg_ParseTuple(arguments, "O!OOOO!O!", &PyLong_Type, &address, &handle, &check, &refuse, &PyType_Type,
                          &envelope, &PyType_Type, &work_type)) {
        return nullptr;
    }
    auto* const messages = allocate<Messages>(type);
    if (!messages) return nullptr;
    messages->open(address, handle, check, work_type);
    messages->refuse = Py_NewRef(refuse);
    messages->envelope = reinterpret_cast<PyTypeObject*>(Py_NewRef(envelope));
    return &messages->object;
}

void destroy(PyObject* self) {
    auto& messages = *reinterpret_cast<Messages*>(self);
    messages.close();
    Py_DECREF(messages.refuse);
    Py_DECREF(reinterpret_cast<PyObject*>(messages.envelope));
    release(self);
}

PyMethodDef methods[] = {
    method<send>("send"),
    method<isend>("isend"),
    method<recv>("recv"),
    method<irecv>("irecv"),
    method<probe>("probe"),
    method<recv_bytes>("recv_bytes"),
    {},
};
PyType_Slot slots[] = {
    {Py_tp_new, constructor<create>()},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._messages.Messages", sizeof(Messages), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                 slots};

// --- MessageWork -----------------------------------------------------------------------------------------------------

PyMethodDef work_methods[] = {{"cancel", cancel_call, METH_NOARGS, nullptr}, {}};
PyType_Slot work_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_started_call)},
    {Py_tp_methods, work_methods},
    {},
};
PyType_Spec work_spec{"ringcomm._messages.MessageWork", sizeof(MessageWork), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots};

int fill(PyObject* module) {
    if (PyArray_ImportNumPyAPI() < 0 || !started_call_type()) return -1;
    return add_type(module, spec) < 0 ? -1 : add_type(module, work_spec, started_call_type());
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {}};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "_messages", nullptr, 0,      nullptr,
                       module_slots,          nullptr,     nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__messages(void) { return PyModuleDef_Init(&definition); }
