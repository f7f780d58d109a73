// Shared arrays: NumPy allocates in the heap of a rank (NEP 49).
#define NO_IMPORT_ARRAY  // fast_path.cpp does
#include <cstring>

#include "abi/handles.h"
#include "core/waiting.h"
#include "fast_path.h"
#include "shm/group.h"

namespace ringcomm {

namespace {

constexpr const char* CAPSULE = "mem_handler";  // as NumPy expects
constexpr uint64_t SHORT_FOR = 100'000'000;     // ns after a shortage until the next look: one costs 0.1 ms
thread_local bool asking = false;               // what the asked allocate is private

// Arrays hold the capsule of the handler that has allocated them, and the capsule this. Which allocator a block belongs
// to follows from its address: NumPy may free a block with a size of 0.
class Handler {
public:
    // Takes the references. `available` returns the bytes that this process may still take; `warn` tells the user that
    // there are too few.
    Handler(std::shared_ptr<Heap> heap, PyObject* before, PyDataMemAllocator& allocator, PyObject* available,
            PyObject* warn)
        : heap_(std::move(heap)), before_(before), private_(allocator), available_(available), warn_(warn) {
        strcpy(handler_.name, "ringcomm.shared_arrays");
    }
    ~Handler() {
        Py_DECREF(before_);
        Py_DECREF(available_);
        Py_DECREF(warn_);
    }

    PyObject* capsule() {
        return PyCapsule_New(&handler_, CAPSULE, [](PyObject* capsule) {
            auto* const handler = static_cast<PyDataMem_Handler*>(PyCapsule_GetPointer(capsule, CAPSULE));
            delete static_cast<Handler*>(handler->allocator.ctx);
        });
    }

private:
    static Handler& of(void* context) { return *static_cast<Handler*>(context); }

    static void* allocate(void* context, size_t bytes) {
        Handler& handler = of(context);
        if (void* const block = handler.take(bytes, false)) return block;
        return handler.private_.malloc(handler.private_.ctx, bytes);
    }

    static void* allocate_zeros(void* context, size_t count, size_t bytes) {
        Handler& handler = of(context);
        size_t total;
        if (!__builtin_mul_overflow(count, bytes, &total)) {
            if (void* const block = handler.take(total, true)) return block;
        }
        return handler.private_.calloc(handler.private_.ctx, count, bytes);
    }

    static void* reallocate(void* context, void* given, size_t bytes) {
        Handler& handler = of(context);
        if (!given) return allocate(context, bytes);
        if (!handler.heap_->contains(given)) return handler.private_.realloc(handler.private_.ctx, given, bytes);
        auto* const block = static_cast<std::byte*>(given);
        return contained([&]() -> void* {
            if (handler.heap_->resize(block, bytes)) return block;
            const size_t known = handler.heap_->bytes(block);
            void* const moved = known ? allocate(context, bytes) : nullptr;
            if (!moved) return nullptr;
            memcpy(moved, block, std::min(bytes, known));
            handler.heap_->free(block);
            return moved;
        });
    }

    static void release(void* context, void* block, size_t bytes) {
        Handler& handler = of(context);
        if (!handler.heap_->contains(block)) return handler.private_.free(handler.private_.ctx, block, bytes);
        contained([&] {
            handler.heap_->free(static_cast<std::byte*>(block));
            return nullptr;
        });
    }

    // No exception may reach NumPy's C code. The only one is that memory for the heap's own lists has run out.
    template <class Action>
    static void* contained(Action action) {
        try {
            return action();
        } catch (const std::exception&) {
            return nullptr;
        }
    }

    // nullptr: private memory has to do.
    void* take(size_t bytes, bool zeroed) {
        return contained([&] { return try_take(bytes, zeroed); });
    }

    std::byte* try_take(size_t bytes, bool zeroed) {
        if (bytes < Heap::LEAST || asking || heap_->forked()) return nullptr;
        if (std::byte* const block = heap_->allocate(bytes, zeroed)) return block;
        if (now_ns() < short_until_.load()) return nullptr;
        const size_t whole = round_up(bytes, PAGE), wanted = std::max(whole, Heap::STEP);
        for (int turn = 0; turn < 2; ++turn) {
            if (turn) heap_->give_back();
            const size_t granted = std::min(wanted, ask(available_, bytes));
            if (granted < whole) continue;
            if (std::byte* const block = heap_->allocate(bytes, zeroed, granted)) return block;
        }
        ask(warn_, bytes);
        short_until_.store(now_ns() + SHORT_FOR);
        return nullptr;
    }

    // The number that a Python function returns, else 0. It must not disturb the caller, in which an exception may be
    // pending, and which holds the GIL or not.
    static size_t ask(PyObject* function, size_t bytes) {
        const PyGILState_STATE state = PyGILState_Ensure();
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        asking = true;
        PyObject* const answer = PyObject_CallFunction(function, "n", Py_ssize_t(bytes));
        asking = false;
        size_t number = 0;
        if (answer && answer != Py_None) number = PyLong_AsSize_t(answer);
        if (PyErr_Occurred()) {
            number = 0;
            if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
                PyErr_SetInterrupt();  // again, where the caller can raise it
                PyErr_Clear();
            } else {
                PyErr_WriteUnraisable(function);
            }
        }
        Py_XDECREF(answer);
        PyErr_Restore(type, value, traceback);
        PyGILState_Release(state);
        return number;
    }

    PyDataMem_Handler handler_{"", 1, {this, allocate, allocate_zeros, reallocate, release}};
    const std::shared_ptr<Heap> heap_;
    PyObject* const before_;  // keeps `private_` alive
    PyDataMemAllocator& private_;
    PyObject *const available_, *const warn_;
    std::atomic<uint64_t> short_until_{0};
};

}  // namespace

// make_handler(address of an rc_comm, check, available, warn): the capsule of a handler for its heap, which leaves all
// else to the present handler; or a string: why there is no heap here.
PyObject* make_handler(PyObject*, PyObject* const* values, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", count);
    auto* const comm = static_cast<rc_comm*>(PyLong_AsVoidPtr(values[0]));
    if (PyErr_Occurred()) return nullptr;
    std::shared_ptr<Heap> heap;
    std::string why = "RLIMIT_AS or RLIMIT_FSIZE of a rank leaves no room for shared ones";
    const int status = enter(comm, [&](const EntryGuard& entry) {
        ShmGroup* const local = dynamic_cast<ShmGroup*>(&entry.group());
        try {
            if (local) heap = local->world->heaps.open();
        } catch (const Failure& failure) {  // its range of addresses cannot be mapped
            why = failure.error.message;
        }
    });
    if (status != RC_OK) return PyObject_CallFunction(values[1], "i", status);  // raises
    if (!heap) return PyUnicode_FromString(why.c_str());
    PyObject* const before = PyDataMem_GetHandler();
    if (!before) return nullptr;
    auto* const allocator = static_cast<PyDataMem_Handler*>(PyCapsule_GetPointer(before, CAPSULE));
    if (!allocator) {
        Py_DECREF(before);
        return nullptr;
    }
    auto* const handler =
        new Handler(std::move(heap), before, allocator->allocator, Py_NewRef(values[2]), Py_NewRef(values[3]));
    PyObject* const capsule = handler->capsule();
    if (!capsule) delete handler;
    return capsule;
}

// set_handler(capsule): the handler of this context from now on; returns the one before.
PyObject* set_handler(PyObject*, PyObject* handler) { return PyDataMem_SetHandler(handler); }

}  // namespace ringcomm
