// The requests of ringcomm.mpi4py: transfers of plain arrays, and waiting for several requests at once.
//
// Another module in the library of ringcomm._native, because it must share the core's state. What is not plain takes
// the general way, in ringcomm/mpi4py: statuses, failures, and operations that more than one call of the core makes.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include "fast_path.h"

#include <structmember.h>

#include <vector>

using namespace ringcomm;

namespace {

constexpr int64_t ANY_TAG = -1, LARGEST_TAG = INT32_MAX;  // of MPI

PyTypeObject *operation_type, *persistent_type;
PyObject* name;  // the name of the attribute of a request that has its operation

bool is_a(PyObject* object, PyTypeObject* type) { return PyObject_TypeCheck(object, type); }

// The Python objects.

// An operation that a request names.
struct Operation {
    StartedCall call;
    PyObject* context;  // of the communicator, whose error handler hears of failures; nullptr after tp_clear
};

enum class Kind { SEND, SYNCHRONOUS_SEND, RECEIVE };

struct Transfer {
    Kind kind;
    Array array;
    int peer;
    int64_t tag;

    int start(rc_comm* comm, rc_work** work) const {
        if (kind == Kind::RECEIVE) {
            const uint64_t bytes = array.count * uint64_t(rc_dtype_bytes(array.dtype));
            return rc_recv_message(comm, array.data, bytes, peer, tag, 0, OWN_TIMEOUT, nullptr, work);
        }
        auto* const send = kind == Kind::SEND ? rc_send : rc_send_synchronous;
        return send(comm, array.data, array.count, array.dtype, peer, tag, OWN_TIMEOUT, work);
    }
};

// Starts the transfers of a communicator.
struct Requests {
    PyObject object;
    FastPath* fast_path;
    PyTypeObject *operation, *request;  // subclasses of Operation, and of Handle in Python
};

// An operation that can be started again and again. It is garbage-collected, as the operation is.
struct Persistent {
    PyObject object;
    PyObject* started;   // the operation while it is active, else None or nullptr
    Requests* requests;  // nullptr: the transfer is not plain
    PyObject *context, *array;
    Transfer transfer;

    bool active() const { return started && started != Py_None; }
};

// What a receive has received: source, tag and bytes.
PyObject* arrived(StartedCall& call) {
    rc_message message;
    const int status = rc_work_message(call.pending.work, &message);
    return status == RC_OK ? fields_of(message) : raise(call.owner->check, status);
}

Operation* make_operation(const Requests& requests, PyObject* context) {
    auto* const operation = allocate<Operation>(requests.operation);
    if (operation) operation->context = Py_NewRef(context);
    return operation;
}

// Makes the operation of a transfer that is to be started.
Operation* make_operation(const Requests& requests, PyObject* context, const Transfer& transfer, PyObject* array) {
    Operation* const operation = make_operation(requests, context);
    if (!operation) return nullptr;
    requests.fast_path->sweep();
    operation->call.outcome = transfer.kind == Kind::RECEIVE ? arrived : given_result;
    operation->call.hold({{}, Py_NewRef(array), nullptr}, Py_NewRef(Py_None));
    return operation;
}

// Takes the reference of the operation.
PyObject* make_request(const Requests& requests, PyObject* operation) {
    PyObject* const request = allocate<PyObject>(requests.request);
    const int set = request ? PyObject_SetAttr(request, name, operation) : -1;
    Py_DECREF(operation);
    if (set == 0) return request;
    Py_XDECREF(request);
    return nullptr;
}

// --- Methods of Requests ---------------------------------------------------------------------------------------------

bool read(const Requests& requests, Kind kind, PyObject* buffer, PyObject* peer, PyObject* tag, Transfer& transfer) {
    FastPath& fast_path = *requests.fast_path;
    PyObject* const values[] = {peer, tag};
    Arguments given(fast_path, values, 2);
    const bool receives = kind == Kind::RECEIVE;
    transfer.kind = kind;
    if (!(receives ? given.source_or_any(transfer.peer) : given.rank(transfer.peer)) || !given.tag(transfer.tag)) {
        return false;
    }
    if (receives && transfer.tag == ANY_TAG) {
        transfer.tag = RC_ANY_TAG;
    } else if (transfer.tag < 0 || transfer.tag > LARGEST_TAG) {
        return false;
    }
    return fast_path.arrays.read(buffer, transfer.array, receives);
}

// (context, buffer, peer, tag): returns a request.
template <Kind kind>
PyObject* start(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    const Requests& requests = *reinterpret_cast<Requests*>(self);
    Transfer transfer;
    if (number != 4 || !read(requests, kind, values[1], values[2], values[3], transfer)) return not_plain();
    FastPath& fast_path = *requests.fast_path;
    Operation* const operation = make_operation(requests, values[0], transfer, values[1]);
    if (!operation) return nullptr;
    const int status = without_gil([&] { return transfer.start(fast_path.comm, &operation->call.pending.work); });
    if (operation->call.started(fast_path, status) == RC_OK) return make_request(requests, &operation->call.object);
    Py_DECREF(&operation->call.object);
    return raise(fast_path.check, status);
}

// operation(context): one that was not started.
PyObject* operation(PyObject* self, PyObject* context) {
    return reinterpret_cast<PyObject*>(make_operation(*reinterpret_cast<Requests*>(self), context));
}

// request(operation)
PyObject* request(PyObject* self, PyObject* operation) {
    return make_request(*reinterpret_cast<Requests*>(self), Py_NewRef(operation));
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *fast_path, *operation, *request;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &fast_path, &PyType_Type, &operation, &PyType_Type, &request)) {
        return nullptr;
    }
    auto* const requests = allocate<Requests>(type);
    if (!requests) return nullptr;
    requests->fast_path = reinterpret_cast<FastPath*>(Py_NewRef(fast_path));
    requests->operation = reinterpret_cast<PyTypeObject*>(Py_NewRef(operation));
    requests->request = reinterpret_cast<PyTypeObject*>(Py_NewRef(request));
    return &requests->object;
}

void destroy(PyObject* self) {
    const Requests& requests = *reinterpret_cast<Requests*>(self);
    Py_DECREF(&requests.fast_path->object);
    Py_DECREF(reinterpret_cast<PyObject*>(requests.operation));
    Py_DECREF(reinterpret_cast<PyObject*>(requests.request));
    release(self);
}

PyMethodDef methods[] = {
    method("isend", start<Kind::SEND>),    method("issend", start<Kind::SYNCHRONOUS_SEND>),
    method("irecv", start<Kind::RECEIVE>), {"operation", operation, METH_O, nullptr},
    {"request", request, METH_O, nullptr}, {},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {},
};
PyType_Spec spec{"ringcomm._requests.Requests", sizeof(Requests), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                 slots};

// --- Operation -------------------------------------------------------------------------------------------------------

int traverse_operation(PyObject* self, visitproc visit, void* arg) {
    auto& operation = *reinterpret_cast<Operation*>(self);
    Py_VISIT(operation.context);
    return operation.call.visit(visit, arg);
}

int clear_operation(PyObject* self) {
    auto& operation = *reinterpret_cast<Operation*>(self);
    operation.call.reset();
    Py_CLEAR(operation.context);
    return 0;
}

void drop_operation(PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear_operation(self);
    release(self);
}

PyMethodDef operation_methods[] = {{"cancel", cancel_call, METH_NOARGS, nullptr}, {}};
PyMemberDef operation_members[] = {{"context", T_OBJECT, offsetof(Operation, context), 0, nullptr}, {}};
PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_operation)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_operation)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_operation)},
    {Py_tp_methods, operation_methods},
    {Py_tp_members, operation_members},
    {},
};
PyType_Spec operation_spec{"ringcomm._requests.Operation", sizeof(Operation), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
                           operation_slots};

// --- Persistent ------------------------------------------------------------------------------------------------------

// prepare(requests, context, kind, buffer, peer, tag): from now on start_all() starts this transfer, if it is plain.
PyObject* prepare(PyObject* self, PyObject* const* values, Py_ssize_t number) {
    auto& persistent = *reinterpret_cast<Persistent*>(self);
    int kind;
    if (number != 6 || !small(values[2], kind) || persistent.requests) {
        return PyErr_Format(PyExc_TypeError, "prepare takes 6 arguments, once");
    }
    auto* const requests = reinterpret_cast<Requests*>(values[0]);
    if (read(*requests, Kind(kind), values[3], values[4], values[5], persistent.transfer)) {
        persistent.requests = reinterpret_cast<Requests*>(Py_NewRef(values[0]));
        persistent.context = Py_NewRef(values[1]);
        persistent.array = Py_NewRef(values[3]);
    }
    Py_RETURN_NONE;
}

int traverse_persistent(PyObject* self, visitproc visit, void* arg) {
    const auto& persistent = *reinterpret_cast<Persistent*>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(persistent.started);
    Py_VISIT(persistent.context);
    Py_VISIT(persistent.array);
    return 0;
}

int clear_persistent(PyObject* self) {
    auto& persistent = *reinterpret_cast<Persistent*>(self);
    Py_CLEAR(persistent.started);
    Py_XDECREF(reinterpret_cast<PyObject*>(std::exchange(persistent.requests, nullptr)));
    Py_CLEAR(persistent.context);
    Py_CLEAR(persistent.array);
    return 0;
}

void drop_persistent(PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear_persistent(self);
    release(self);
}

PyMethodDef persistent_methods[] = {method("prepare", prepare), {}};
PyMemberDef persistent_members[] = {{"started", T_OBJECT, offsetof(Persistent, started), 0, nullptr}, {}};
PyType_Slot persistent_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_persistent)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_persistent)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_persistent)},
    {Py_tp_methods, persistent_methods},
    {Py_tp_members, persistent_members},
    {},
};
PyType_Spec persistent_spec{"ringcomm._requests.Persistent", sizeof(Persistent), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
                            persistent_slots};

// --- Several requests ------------------------------------------------------------------------------------------------

// The items of a list or tuple of requests; of others there are none.
class Handles {
public:
    explicit Handles(PyObject* requests) : requests_(requests), is_list_(PyList_CheckExact(requests)) {
        known_ = is_list_ || PyTuple_CheckExact(requests);
    }

    bool known() const { return known_; }
    Py_ssize_t size() const { return !known_ ? 0 : is_list_ ? PyList_Size(requests_) : PyTuple_Size(requests_); }
    // What a request names, a new reference; nullptr: it is no request.
    PyObject* operation(Py_ssize_t index) const {
        PyObject* const found = PyObject_GetAttr(handle(index), name);
        if (!found) PyErr_Clear();  // the general way raises the error
        return found;
    }
    PyObject* handle(Py_ssize_t index) const {
        return is_list_ ? PyList_GetItem(requests_, index) : PyTuple_GetItem(requests_, index);
    }

private:
    PyObject* const requests_;
    const bool is_list_;
    bool known_;
};

// The operations of several requests, as far as the core waits for them.
class Operations {
public:
    ~Operations() {
        for (const Request& each : requests_) {
            Py_DECREF(each.handle);
            Py_DECREF(each.named);
            if (each.operation) Py_DECREF(&each.operation->call.object);
        }
    }

    // False: there are others, too.
    bool read(PyObject* requests) {
        const Handles handles(requests);
        requests_.reserve(handles.size());
        for (Py_ssize_t i = 0; i < handles.size(); ++i) {
            if (!add(handles, i)) return false;
        }
        return handles.known();
    }

    // Without the GIL. Returns the first status of a failure.
    int wait() const {
        for (const Request& each : requests_) {
            const int status =
                each.operation ? rc_work_wait(each.operation->call.pending.work, OWN_TIMEOUT, nullptr) : RC_OK;
            if (status != RC_OK) return status;
        }
        return RC_OK;
    }

    bool done() const {
        for (const Request& each : requests_) {
            if (each.operation && !each.operation->call.pending.done()) return false;
        }
        return true;
    }

    // Raises the error behind a status.
    PyObject* fail(int status) const {
        for (const Request& each : requests_) {
            if (each.operation) return raise(each.operation->call.owner->check, status);
        }
        return nullptr;
    }

    // All have completed.
    void release() const {
        for (const Request& each : requests_) {
            if (!each.operation) continue;
            each.operation->call.pending.release_memory();
            if (!is_a(each.named, persistent_type)) {
                if (PyObject_SetAttr(each.handle, name, nullptr) < 0) PyErr_Clear();  // another thread has
            } else if (auto& persistent = *reinterpret_cast<Persistent*>(each.named);
                       persistent.started == &each.operation->call.object) {
                Py_CLEAR(persistent.started);
            }
        }
    }

private:
    struct Request {
        PyObject *handle, *named;  // what it names
        Operation* operation;      // nullptr: it is null, or not active
    };

    bool add(const Handles& handles, Py_ssize_t index) {
        PyObject* const named = handles.operation(index);
        if (!named) return false;
        PyObject* const active = is_a(named, persistent_type) ? reinterpret_cast<Persistent*>(named)->started : named;
        Operation* operation = nullptr;
        if (active && active != Py_None) {
            operation = is_a(active, operation_type) ? reinterpret_cast<Operation*>(Py_NewRef(active)) : nullptr;
            if (!operation || !operation->call.owner) {
                Py_XDECREF(reinterpret_cast<PyObject*>(operation));
                Py_DECREF(named);
                return false;
            }
        }
        requests_.push_back({Py_NewRef(handles.handle(index)), named, operation});
        return true;
    }

    std::vector<Request> requests_;
};

// wait_all(requests): whether all have succeeded, and are null now or, if persistent, not active.
PyObject* wait_all(PyObject*, PyObject* requests) {
    Operations operations;
    if (!operations.read(requests)) Py_RETURN_FALSE;
    const int status = without_gil([&] { return operations.wait(); });
    if (status == RC_INTERRUPTED) return operations.fail(status);
    if (status != RC_OK) Py_RETURN_FALSE;
    operations.release();
    Py_RETURN_TRUE;
}

// test_all(requests): whether all are done, and then as after wait_all(); None: the general way has to find out.
PyObject* test_all(PyObject*, PyObject* requests) {
    Operations operations;
    if (!operations.read(requests)) Py_RETURN_NONE;
    if (!operations.done()) Py_RETURN_FALSE;
    if (operations.wait() != RC_OK) Py_RETURN_NONE;
    operations.release();
    Py_RETURN_TRUE;
}

// start_all(requests): how many it has started, from the first on. The next one is not plain, or fails.
PyObject* start_all(PyObject*, PyObject* requests) {
    struct Start {
        Persistent* persistent;
        Operation* operation;
        int status;
    };
    std::vector<Start> starts;
    const Handles handles(requests);
    starts.reserve(handles.size());
    for (Py_ssize_t i = 0; i < handles.size(); ++i) {
        PyObject* const named = handles.operation(i);
        if (!named) break;
        auto& persistent = *reinterpret_cast<Persistent*>(named);
        const bool plain = is_a(named, persistent_type) && persistent.requests && !persistent.active();
        Operation* const operation =
            plain ? make_operation(*persistent.requests, persistent.context, persistent.transfer, persistent.array)
                  : nullptr;
        if (!operation) {
            Py_DECREF(named);
            break;
        }
        Py_XDECREF(std::exchange(persistent.started, Py_NewRef(&operation->call.object)));
        starts.push_back({&persistent, operation, RC_ARGUMENT});
    }
    without_gil([&] {
        for (Start& each : starts) {
            each.status = each.persistent->transfer.start(each.persistent->requests->fast_path->comm,
                                                          &each.operation->call.pending.work);
            if (each.status != RC_OK) break;
        }
        return RC_OK;
    });
    Py_ssize_t number = 0;
    for (const Start& each : starts) {
        const int status = each.operation->call.started(*each.persistent->requests->fast_path, each.status);
        number += status == RC_OK;
        if (status != RC_OK && each.persistent->started == &each.operation->call.object) Py_CLEAR(each.persistent->started);
        Py_DECREF(&each.operation->call.object);
        Py_DECREF(&each.persistent->object);
    }
    return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(number);
}

PyMethodDef functions[] = {
    {"wait_all", wait_all, METH_O, nullptr},
    {"test_all", test_all, METH_O, nullptr},
    {"start_all", start_all, METH_O, nullptr},
    {},
};

// Adds a type; returns it, or nullptr.
PyTypeObject* add(PyObject* module, PyType_Spec& spec, PyTypeObject* base) {
    PyObject* const type = PyType_FromModuleAndSpec(module, &spec, reinterpret_cast<PyObject*>(base));
    if (type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0) {
        return reinterpret_cast<PyTypeObject*>(type);
    }
    Py_XDECREF(type);
    return nullptr;
}

int fill(PyObject* module) {
    name = PyUnicode_InternFromString("_object");
    if (!name || !started_call_type() || add_type(module, spec) < 0) return -1;
    operation_type = add(module, operation_spec, started_call_type());
    persistent_type = operation_type ? add(module, persistent_spec, nullptr) : nullptr;
    return persistent_type ? 0 : -1;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {}};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "_requests", nullptr, 0,      functions,
                       module_slots,          nullptr,     nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__requests(void) { return PyModuleDef_Init(&definition); }
