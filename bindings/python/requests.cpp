// The types of requests.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include "requests.h"

#include <structmember.h>

#include <algorithm>
#include <optional>

namespace ringcomm {

PyTypeObject *request_type, *operation_type, *persistent_type;

namespace {

constexpr int64_t ANY_TAG = -1, LARGEST_TAG = INT32_MAX;  // of MPI

// What a receive has received: source, tag and bytes.
PyObject* arrived(StartedCall& call) {
    rc_message message;
    const int status = rc_work_message(call.pending.work, &message);
    return status == RC_OK ? fields_of(message) : raise(call.owner->check, status);
}

// The operation is to move the array.
void hold(PendingOperation& operation, int kind, PyObject* array) {
    operation.call.outcome = kind == RC_RECV_MESSAGE ? arrived : given_result;
    operation.call.hold({{}, Py_NewRef(array), nullptr}, Py_NewRef(Py_None));
}

PendingOperation* make_operation(const RequestMaker& maker, PyObject* context) {
    auto* const operation = allocate<PendingOperation>(maker.operation);
    if (operation) operation->context = Py_NewRef(context);
    return operation;
}

// Takes the reference of the operation.
PyObject* make_request(const RequestMaker& maker, PyObject* operation) {
    auto* const request = allocate<RequestHandle>(maker.request);
    if (!request) {
        Py_DECREF(operation);
        return nullptr;
    }
    request->named = operation;
    return &request->object;
}

// --- Methods of RequestMaker -----------------------------------------------------------------------------------------

// Returns the bytes of a plain transfer.
std::optional<uint64_t> read(const RequestMaker& maker, PyObject* buffer, PyObject* peer, PyObject* tag,
                             rc_transfer& transfer) {
    FastPath& fast_path = *maker.fast_path;
    PyObject* const values[] = {peer, tag};
    Arguments given(fast_path, values, 2);
    const bool receives = transfer.kind == RC_RECV_MESSAGE;
    if (!(receives ? given.source_or_any(transfer.peer) : given.rank(transfer.peer)) || !given.tag(transfer.tag)) {
        return {};
    }
    if (receives && transfer.tag == ANY_TAG) {
        transfer.tag = RC_ANY_TAG;
    } else if (transfer.tag < 0 || transfer.tag > LARGEST_TAG) {
        return {};
    }
    Array array;
    if (!fast_path.arrays.read(buffer, array, receives)) return {};
    array.fill(transfer);
    return array.bytes();
}

// (context, buffer, peer, tag): returns a request.
template <int kind>
PyObject* start(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    const RequestMaker& maker = *reinterpret_cast<RequestMaker*>(self);
    rc_transfer transfer = transfer_of(kind);
    if (number != 4) return not_plain();
    const auto bytes = read(maker, values[1], values[2], values[3], transfer);
    if (!bytes) return not_plain();
    FastPath& fast_path = *maker.fast_path;
    PendingOperation* const operation = make_operation(maker, values[0]);
    if (!operation) return nullptr;
    fast_path.sweep();
    hold(*operation, kind, values[1]);
    operation->call.moves_little = *bytes <= LITTLE_BYTES;
    const int status =
        run_core(*bytes, [&] { return rc_transfer_start(fast_path.comm, &transfer, &operation->call.pending.work); });
    if (operation->call.started(fast_path, status) == RC_OK) return make_request(maker, &operation->call.object);
    Py_DECREF(&operation->call.object);
    return raise(fast_path.check, status);
}

// (context, …): the arguments of the method of the fast path but async_op. Returns a request.
template <int code>
PyObject* start_collective(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    constexpr Py_ssize_t MOST = 6;
    if (number < 1 || number > MOST) return not_plain();
    const RequestMaker& maker = *reinterpret_cast<RequestMaker*>(self);
    PendingOperation* const operation = make_operation(maker, values[0]);
    if (!operation) return nullptr;
    PyObject* given[MOST];
    *std::copy(values + 1, values + number, given) = &operation->call.object;
    PyObject* const started = collective<code, moves_as_bytes(code)>(&maker.fast_path->object, given, number);
    Py_DECREF(&operation->call.object);
    return started == &operation->call.object ? make_request(maker, started) : started;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *fast_path, *operation, *request;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &fast_path, &PyType_Type, &operation, &PyType_Type, &request)) {
        return nullptr;
    }
    const auto is_subtype = [](PyObject* subclass, PyTypeObject* base) {
        return PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(subclass), base);
    };
    if (!is_subtype(operation, operation_type) || !is_subtype(request, request_type)) {
        return PyErr_Format(PyExc_TypeError, "expected subclasses of PendingOperation and RequestHandle");
    }
    auto* const maker = allocate<RequestMaker>(type);
    if (!maker) return nullptr;
    maker->fast_path = reinterpret_cast<FastPath*>(Py_NewRef(fast_path));
    maker->operation = reinterpret_cast<PyTypeObject*>(Py_NewRef(operation));
    maker->request = reinterpret_cast<PyTypeObject*>(Py_NewRef(request));
    return &maker->object;
}

void destroy(PyObject* self) {
    const RequestMaker& maker = *reinterpret_cast<RequestMaker*>(self);
    Py_DECREF(&maker.fast_path->object);
    Py_DECREF(reinterpret_cast<PyObject*>(maker.operation));
    Py_DECREF(reinterpret_cast<PyObject*>(maker.request));
    release(self);
}

PyMethodDef methods[] = {
    method<start<RC_SEND>>("isend"),
    method<start<RC_SEND_SYNCHRONOUS>>("issend"),
    method<start<RC_RECV_MESSAGE>>("irecv"),
#define MOVES(name, NAME) method<start_collective<RC_##NAME>>(#name),
#define COLLECTIVE_ROW PUBLIC_ROW
#include "ringcomm/types.def"
    {},
};
PyType_Slot slots[] = {
    constructor<create>(),
    slot(Py_tp_dealloc, destroy),
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._fast_path.RequestMaker", sizeof(RequestMaker), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};

// --- RequestHandle ---------------------------------------------------------------------------------------------------

PyMemberDef request_members[] = {{"_object", T_OBJECT, offsetof(RequestHandle, named), 0, nullptr}, {}};
PyType_Slot request_slots[] = {
    COLLECTED_SLOTS(RequestHandle),
    {Py_tp_members, request_members},
    {},
};
PyType_Spec request_spec{"ringcomm._fast_path.RequestHandle", sizeof(RequestHandle), 0, COLLECTED, request_slots};

// --- PendingOperation ------------------------------------------------------------------------------------------------

PyMethodDef operation_methods[] = {{"cancel", cancel_call, METH_NOARGS, nullptr}, {}};
PyMemberDef operation_members[] = {
    {"context", T_OBJECT, offsetof(PendingOperation, context), 0, nullptr},
    {"_completed", T_BOOL, offsetof(PendingOperation, completed), 0, nullptr},
    {"_cancelled", T_BOOL, offsetof(PendingOperation, cancelled), 0, nullptr},
    {"_watched", T_BOOL, offsetof(PendingOperation, watched), 0, nullptr},
    {},
};
PyType_Slot operation_slots[] = {
    COLLECTED_SLOTS(PendingOperation),
    {Py_tp_methods, operation_methods},
    {Py_tp_members, operation_members},
    {},
};
PyType_Spec operation_spec{"ringcomm._fast_path.PendingOperation", sizeof(PendingOperation), 0, COLLECTED,
                           operation_slots};

// --- PersistentOperation ---------------------------------------------------------------------------------------------

// prepare(maker, kind, buffer, peer, tag): from now on start_all() starts this transfer, if it is plain.
PyObject* prepare(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    auto& persistent = *reinterpret_cast<PersistentOperation*>(self);
    int kind;
    StartedCall& call = persistent.operation.call;
    if (number != 5 || !small(values[1], kind) || persistent.array) {
        return PyErr_Format(PyExc_TypeError, "prepare takes 5 arguments, once");
    }
    const auto& maker = *reinterpret_cast<RequestMaker*>(values[0]);
    rc_transfer transfer = transfer_of(kind);
    const auto bytes = read(maker, values[2], values[3], values[4], transfer);
    if (!bytes) Py_RETURN_NONE;
    hold(persistent.operation, kind, values[2]);
    const int status = rc_transfer_prepare(maker.fast_path->comm, &transfer, &call.pending.work);
    if (call.started(*maker.fast_path, status) != RC_OK) return raise(maker.fast_path->check, status);
    persistent.bytes = *bytes;
    call.moves_little = persistent.bytes <= LITTLE_BYTES;
    persistent.array = Py_NewRef(values[2]);
    Py_RETURN_NONE;
}

PyMethodDef persistent_methods[] = {
    method<prepare>("prepare"),
    method_of_none<start_prepared>("start_prepared"),
    {},
};
PyMemberDef persistent_members[] = {{"active", T_BOOL, offsetof(PersistentOperation, active), 0, nullptr}, {}};
PyType_Slot persistent_slots[] = {
    COLLECTED_SLOTS(PersistentOperation),
    {Py_tp_methods, persistent_methods},
    {Py_tp_members, persistent_members},
    {},
};
PyType_Spec persistent_spec{"ringcomm._fast_path.PersistentOperation", sizeof(PersistentOperation), 0, COLLECTED,
                            persistent_slots};

}  // namespace

int add_request_types(PyObject* module) {
    request_type = add_type(module, request_spec);
    operation_type = add_type(module, operation_spec, started_call_type);
    persistent_type = operation_type ? add_type(module, persistent_spec, operation_type) : nullptr;
    return request_type && persistent_type && add_type(module, spec) ? 0 : -1;
}

}  // namespace ringcomm
