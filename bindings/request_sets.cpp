// Several requests at once: one release of the GIL for all.
#define NO_IMPORT_ARRAY  // fast_path.cpp does
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

// The operations of several requests, as far as the core waits for them.
class Operations {
public:
    explicit Operations(PyObject* requests) : handles_(requests) {}
    ~Operations() {
        for (const Request& each : requests_) {
            Py_XDECREF(each.named);
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

    // Without the GIL. Returns the first status of a failure.
    int wait() const {
        for (const Request& each : requests_) {
            const int status =
                each.operation ? rc_work_wait(each.operation->call.pending.work, OWN_TIMEOUT, nullptr) : RC_OK;
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

    // Adds the indices of those that are active, and of those of them that have ended, to lists. False: the exception
    // is set.
    bool find(PyObject* active, PyObject* done) const {
        for (size_t i = 0; i < requests_.size(); ++i) {
            const StartedOperation* const operation = requests_[i].operation;
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
            each.operation->call.pending.release_memory();
            if (!is_a(each.named, persistent_type)) {
                if (each.handle->named == each.named) Py_CLEAR(each.handle->named);
            } else if (auto& persistent = *reinterpret_cast<PersistentOperation*>(each.named);
                       persistent.started == &each.operation->call.object) {
                Py_CLEAR(persistent.started);
            }
        }
    }

private:
    struct Request {
        RequestHandle* handle;
        PyObject* named;              // nullptr: the request is null
        StartedOperation* operation;  // nullptr: that, or it is not active
    };

    bool add(Py_ssize_t index) {
        RequestHandle* const handle = handles_[index];
        if (!handle) return false;
        PyObject* const named = handle->named;
        PyObject* const active =
            named && is_a(named, persistent_type) ? reinterpret_cast<PersistentOperation*>(named)->started : named;
        StartedOperation* operation = nullptr;
        if (active && active != Py_None) {
            operation = is_a(active, operation_type) ? reinterpret_cast<StartedOperation*>(Py_NewRef(active)) : nullptr;
            if (!operation || !operation->call.owner) {
                Py_XDECREF(reinterpret_cast<PyObject*>(operation));
                return false;
            }
        }
        requests_.push_back({handle, Py_XNewRef(named), operation});
        return true;
    }

    const RequestItems handles_;
    std::vector<Request> requests_;
};

}  // namespace

// wait_all(requests): whether all have succeeded, and are null now or, if persistent, not active.
PyObject* wait_all(PyObject*, PyObject* requests) {
    Operations operations(requests);
    if (!operations.read()) Py_RETURN_FALSE;
    const int status = without_gil([&] { return operations.wait(); });
    if (status == RC_INTERRUPTED) return operations.fail(status);
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

// find_done(requests): the indices of those that are active, and of those of them that are done; None as for
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

// start_all(requests): how many it has started, from the first on. The next one is not plain, or fails.
PyObject* start_all(PyObject*, PyObject* requests) {
    struct Start {
        PersistentOperation* persistent;
        StartedOperation* operation;
        int status;
    };
    std::vector<Start> starts;
    const RequestItems handles(requests);
    starts.reserve(handles.size());
    for (Py_ssize_t i = 0; i < handles.size(); ++i) {
        const RequestHandle* const handle = handles[i];
        if (!handle || !handle->named || !is_a(handle->named, persistent_type)) break;
        auto& persistent = *reinterpret_cast<PersistentOperation*>(handle->named);
        const bool plain = persistent.requests && !persistent.active();
        StartedOperation* const operation =
            plain ? make_operation(*persistent.requests, persistent.context, persistent.transfer, persistent.array)
                  : nullptr;
        if (!operation) break;
        Py_INCREF(&persistent.object);
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
        if (status != RC_OK && each.persistent->started == &each.operation->call.object)
            Py_CLEAR(each.persistent->started);
        Py_DECREF(&each.operation->call.object);
        Py_DECREF(&each.persistent->object);
    }
    return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(number);
}

}  // namespace ringcomm
