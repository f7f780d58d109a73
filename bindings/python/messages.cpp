// The messages of Communicator.messages: from Python's buffer protocol straight into the core. Their arguments are
// positional; ringcomm/transports/messages.py documents them.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include "fast_arrays.h"
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

// Arguments. False: the exception is set.
bool expect(Py_ssize_t least, Py_ssize_t most, Py_ssize_t number) {
    if (number < least || number > most)
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", least, number);
    return number >= least && number <= most;
}
bool read_number(PyObject* given, int64_t& value) {
    value = PyLong_AsLongLong(given);
    return value != -1 || !PyErr_Occurred();
}
bool read_rank(PyObject* given, int& rank) {
    int64_t value;
    if (!read_number(given, value)) return false;
    rank = int(value);
    if (rank == value) return true;
    PyErr_Format(PyExc_OverflowError, "expected a rank, got %lld", static_cast<long long>(value));
    return false;
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

PyObject* received(MessageWork& work) {
    rc_message message;
    const int status = rc_work_message(work.pending.work, &message);
    const auto& messages = static_cast<const Messages&>(*work.owner);
    return status == RC_OK ? make_envelope(messages, message) : raise(messages.check, status);
}

// --- Methods of Messages ---------------------------------------------------------------------------------------------

// The memory of a transfer, and the transfer.
struct MemoryTransfer {
    explicit MemoryTransfer(int kind) : transfer(transfer_of(kind)) {}

    // (data, peer, tag, synchronous=False) of a send, (data, peer, tag, taken=0) of a receive.
    bool read(const Messages& messages, PyObject* const* values, Py_ssize_t number) {
        const bool receives = transfer.kind == RC_RECV_MESSAGE;
        if (!expect(3, 4, number) || !memory.read(messages, values[0], receives)) return false;
        if (!read_rank(values[1], transfer.peer) || !read_number(values[2], transfer.tag)) return false;
        set_bytes(transfer, memory.data(), memory.bytes());
        int64_t last = 0;
        if (number == 4 && !read_number(values[3], last)) return false;
        if (receives) transfer.taken = uint64_t(last);
        if (last && !receives) transfer.kind = RC_SEND_SYNCHRONOUS;
        return true;
    }

    Memory memory;
    rc_transfer transfer;
};

template <int kind>
PyObject* run(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    MemoryTransfer given(kind);
    if (!given.read(messages, values, number)) return nullptr;
    rc_message message;
    const int status =
        run_core(given.memory.bytes(), [&] { return rc_transfer_run(messages.comm, &given.transfer, &message); });
    if (status != RC_OK) return raise(messages.check, status);
    return kind == RC_SEND ? Py_NewRef(Py_None) : make_envelope(messages, message);
}

template <int kind>
PyObject* start(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    MemoryTransfer given(kind);
    if (!given.read(messages, values, number)) return nullptr;
    auto* const work = allocate<MessageWork>(messages.call_type);
    if (!work) return nullptr;
    work->outcome = received;
    const int status =
        work->start(messages, {given.memory.take(), nullptr, nullptr}, nullptr, given.memory.bytes(),
                    [&](rc_work** slot) { return rc_transfer_start(messages.comm, &given.transfer, slot); });
    if (status == RC_OK) return &work->object;
    Py_DECREF(&work->object);
    return raise(messages.check, status);
}

PyObject* recv_bytes(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    int peer;
    int64_t tag;
    if (!expect(2, 2, number) || !read_rank(values[0], peer) || !read_number(values[1], tag)) return nullptr;
    rc_message message;
    PyObject* const bytes = receive_bytes(messages.comm, messages.check, peer, tag, message);
    PyObject* const envelope = bytes ? make_envelope(messages, message) : nullptr;
    if (envelope) return Py_BuildValue("(NN)", bytes, envelope);
    Py_XDECREF(bytes);
    return nullptr;
}

PyObject* probe(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    Messages& messages = messages_of(self);
    rc_transfer probe = transfer_of(RC_PROBE);
    if (!expect(4, 4, number) || !read_rank(values[0], probe.peer) || !read_number(values[1], probe.tag))
        return nullptr;
    const bool waits = values[2] == Py_True;
    if (values[3] == Py_True) probe.kind = RC_TAKE;
    int found = 1;
    rc_message message;
    const int status = without_gil([&] {
        return waits ? rc_transfer_run(messages.comm, &probe, &message)
                     : rc_poll(messages.comm, &probe, &found, &message);
    });
    if (status != RC_OK) return raise(messages.check, status);
    if (!found) return Py_NewRef(Py_None);
    PyObject* const envelope = make_envelope(messages, message);
    return envelope ? Py_BuildValue("(NK)", envelope, static_cast<unsigned long long>(message.taken)) : nullptr;
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
    method<run<RC_SEND>>("send"),
    method<start<RC_SEND>>("isend"),
    method<run<RC_RECV_MESSAGE>>("recv"),
    method<start<RC_RECV_MESSAGE>>("irecv"),
    method<probe>("probe"),
    method<recv_bytes>("recv_bytes"),
    {},
};
PyType_Slot slots[] = {
    constructor<create>(),
    slot(Py_tp_dealloc, destroy),
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._fast_path.Messages", sizeof(Messages), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                 slots};

// --- MessageWork -----------------------------------------------------------------------------------------------------

PyMethodDef work_methods[] = {{"cancel", cancel_call, METH_NOARGS, nullptr}, {}};
PyType_Slot work_slots[] = {
    slot(Py_tp_dealloc, Collected<StartedCall>::drop),
    {Py_tp_methods, work_methods},
    {},
};
PyType_Spec work_spec{"ringcomm._fast_path.MessageWork", sizeof(MessageWork), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots};

}  // namespace

int ringcomm::add_message_types(PyObject* module) {
    return add_type(module, spec) && add_type(module, work_spec, started_call_type) ? 0 : -1;
}
