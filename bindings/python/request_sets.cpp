// Several requests at once: at most one release of the GIL for all.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include <algorithm>
#include <vector>

#include "requests.h"

namespace ringcomm {

namespace {

// The items of a list or tuple of requests. Of others there are none: they take the general way, which raises errors.
class RequestItems {
public:
    explicit RequestItems(PyObject* requests)
        : tuple_(PyTuple_CheckExact(requests)  ? Py_NewRef(requests)
                 : PyList_CheckExact(requests) ? PyList_AsTuple(requests)
                                               : nullptr) {
        PyErr_Clear();
    }
    ~RequestItems() { Py_XDECREF(tuple_); }

    bool known() const { return tuple_; }
    Py_ssize_t size() const { return tuple_ ? PyTuple_Size(tuple_) : 0; }
    // A borrowed reference; nullptr: the item is no request.
    RequestHandle* operator[](Py_ssize_t index) const {
        PyObject* const item = PyTuple_GetItem(tuple_, index);
        return is_a(item, request_type) ? reinterpret_cast<RequestHandle*>(item) : nullptr;
    }

private:
    PyObject* const tuple_;
};

// nullptr: it is started once.
PersistentOperation* as_persistent(PendingOperation* operation) {
    const bool persists = is_a(&operation->call.object, persistent_type);
    return persists ? reinterpret_cast<PersistentOperation*>(operation) : nullptr;
}

// The operations of several requests, as far as the core waits for them.
class Operations {
public:
    explicit Operations(PyObject* requests) : handles_(requests) {}
    ~Operations() {
        for (const Request& each : requests_) {
            if (each.operation) Py_DECREF(&each.operation->call.object);
        }
    }

    // False: there are others, too.
    bool read() {
        requests_.reserve(handles_.size());
        for (Py_ssize_t i = 0; i < handles_.size(); ++i) {
            if (!add(i)) return false;
        }
        return handles_.known();
    }

    bool move_little() const {
        return std::ranges::all_of(requests_, [](const Request& request) {
            return !request.operation || request.operation->call.moves_little;
        });
    }

    // Returns the first status of a failure.
    int wait() {
        for (const Request& each : requests_) {
            if (!each.operation) continue;
            const PendingCall& call = each.operation->call.pending;
            const bool open = !call.ended();
            const int status = rc_work_wait(call.work, OWN_TIMEOUT, nullptr);
            interrupted = open && status == RC_INTERRUPTED;
            if (status != RC_OK) return status;
        }
        return RC_OK;
    }

    // Without the GIL: it may move the data of large messages. Returns whether all are done.
    bool poll() const {
        bool all = true;
        for (const Request& each : requests_) all &= !each.operation || rc_work_done(each.operation->call.pending.work);
        return all;
    }

    // Adds the indices of the active ones, and of the active ones that have ended, to lists. False: the exception
    // is set.
    bool find(PyObject* active, PyObject* done) const {
        for (size_t i = 0; i < requests_.size(); ++i) {
            const PendingOperation* const operation = requests_[i].operation;
            PyObject* const index = operation ? PyLong_FromSize_t(i) : nullptr;
            const bool added = index && PyList_Append(active, index) == 0 &&
                               (!operation->call.pending.ended() || PyList_Append(done, index) == 0);
            Py_XDECREF(index);
            if (operation && !added) return false;
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
            if (PersistentOperation* const persistent = as_persistent(each.operation)) {
                persistent->active = false;  // and keeps its memory
                continue;
            }
            each.operation->call.pending.release_memory();
            if (each.handle->named == &each.operation->call.object) Py_CLEAR(each.handle->named);
        }
    }

    bool interrupted = false;  // a signal handler has raised an exception in wait()

private:
    struct Request {
        RequestHandle* handle;
        PendingOperation* operation;  // an owned reference; nullptr: the request is null, or not active
    };

    bool add(Py_ssize_t index) {
        RequestHandle* const handle = handles_[index];
        if (!handle) return false;
        PendingOperation* operation = nullptr;
        if (handle->named) {
            if (!is_a(handle->named, operation_type)) return false;
            operation = reinterpret_cast<PendingOperation*>(handle->named);
            const PersistentOperation* const persistent = as_persistent(operation);
            if (persistent && !persistent->active) {
                operation = nullptr;
            } else if (!operation->call.owner) {
                return false;
            } else {
                Py_INCREF(handle->named);
            }
        }
        requests_.push_back({handle, operation});
        return true;
    }

    const RequestItems handles_;
    std::vector<Request> requests_;
};

// Operations to be started together.
class PreparedOperations {
public:
    explicit PreparedOperations(Py_ssize_t number) {
        operations_.reserve(number);
        works_.reserve(number);
    }
    ~PreparedOperations() {
        for (size_t i = 0; i < operations_.size(); ++i) {
            if (i >= size_t(number)) operations_[i]->active = false;
            Py_DECREF(&operations_[i]->operation.call.object);
        }
    }

    // False: it is not plain, or active, perhaps because it was added before.
    bool add(PyObject* named) {
        if (!named || !is_a(named, persistent_type)) return false;
        auto& persistent = *reinterpret_cast<PersistentOperation*>(named);
        if (!persistent.array || persistent.active) return false;
        PendingOperation& operation = persistent.operation;
        CallMemory& memory = operation.call.pending.memory;
        if (!memory.source) memory.source = Py_NewRef(persistent.array);
        persistent.active = true;
        operation.completed = operation.cancelled = operation.watched = false;
        Py_INCREF(named);
        operations_.push_back(&persistent);
        works_.push_back(operation.call.pending.work);
        bytes_ += persistent.bytes;
        return true;
    }

    // Returns a status.
    int start() {
        if (works_.empty()) return RC_OK;
        return run_core(bytes_, [&] { return rc_start_all(works_.data(), int(works_.size()), &number); });
    }

    int number = 0;  // of those that have started

private:
    std::vector<PersistentOperation*> operations_;  // owned references
    std::vector<rc_work*> works_;
    uint64_t bytes_ = 0;
};

}  // namespace

// wait_all(requests): whether all have succeeded, and are null now or, if persistent, not active.
PyObject* wait_all(PyObject*, PyObject* requests) {
    Operations operations(requests);
    if (!operations.read()) Py_RETURN_FALSE;
    const auto wait = [&] { return operations.wait(); };
    const int status = operations.move_little() ? run_core(0, wait) : without_gil(wait);
    if (operations.interrupted) return operations.fail(status);
    if (status != RC_OK) Py_RETURN_FALSE;
    operations.release();
    Py_RETURN_TRUE;
}

// test_all(requests): whether all are done, and then as after wait_all(); None: the general way has to find out.
PyObject* test_all(PyObject*, PyObject* requests) {
    Operations operations(requests);
    if (!operations.read()) Py_RETURN_NONE;
    if (!without_gil([&] { return operations.poll(); })) Py_RETURN_FALSE;
    if (operations.wait() != RC_OK) Py_RETURN_NONE;
    operations.release();
    Py_RETURN_TRUE;
}

// find_done(requests): the indices of the active ones, and of the active ones that are done; None as for
// test_all().
PyObject* find_done(PyObject*, PyObject* requests) {
    Operations operations(requests);
    if (!operations.read()) Py_RETURN_NONE;
    without_gil([&] { return operations.poll(); });
    PyObject *const active = PyList_New(0), *const done = PyList_New(0);
    const bool found = active && done && operations.find(active, done);
    PyObject* const both = found ? PyTuple_Pack(2, active, done) : nullptr;
    Py_XDECREF(active);
    Py_XDECREF(done);
    return both;
}

// start_all(requests): how many it has started, from the first on: none unless all are plain and not active. The next
// one fails.
PyObject* start_all(PyObject*, PyObject* requests) {
    const RequestItems handles(requests);
    PreparedOperations operations(handles.size());
    bool all = true;
    for (Py_ssize_t i = 0; i < handles.size() && all; ++i) {
        const RequestHandle* const handle = handles[i];
        all = handle && operations.add(handle->named);
    }
    if (all) operations.start();
    return PyLong_FromLong(operations.number);
}

PyObject* start_prepared(PyObject* self, PyObject*) {
    PreparedOperations operation(1);
    if (!operation.add(self)) Py_RETURN_FALSE;
    const int status = operation.start();
    const CallOwner& owner = *reinterpret_cast<PersistentOperation*>(self)->operation.call.owner;
    return status == RC_OK ? Py_NewRef(Py_True) : raise(owner.check, status);
}

}  // namespace ringcomm
