// What all functions of the emulated driver share: handles, and the checks at the start of a call.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "bindings/emulated_cuda/functions.h"

namespace ringcomm::emulated {

using namespace cu;

inline std::atomic<uintptr_t> next_handle{0x10000};

// Handles of one type. None is used twice, nor for two types: that of a destroyed object is always found to be one.
template <class Handle, class Object>
class Handles {
public:
    Handle add(std::shared_ptr<Object> object) {
        const std::lock_guard lock(mutex_);
        const auto handle = reinterpret_cast<Handle>(next_handle += 2 * sizeof(void*));
        objects_.emplace(handle, std::move(object));
        return handle;
    }

    std::shared_ptr<Object> find(Handle handle) {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }

    std::shared_ptr<Object> remove(Handle handle) {
        const std::lock_guard lock(mutex_);
        auto node = objects_.extract(handle);
        return node ? std::move(node.mapped()) : nullptr;
    }

    std::vector<std::shared_ptr<Object>> all() {
        const std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Object>> all;
        for (const auto& [handle, object] : objects_) all.push_back(object);
        return all;
    }

private:
    std::mutex mutex_;
    std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

// Not destroyed at exit: a stream may still be running then.
template <class Object>
Object& immortal() {
    static Object& object = *new Object;
    return object;
}

struct Settings {
    std::atomic<bool> initialized = false;
    std::atomic<uint64_t> seed = 0;
    std::atomic<bool> skip_launches = false, await_launches = false, unreachable = false;
    std::atomic<CUresult> failed = CUDA_SUCCESS;  // a step has failed: from then on every call reports it, as on a GPU
};
inline Settings settings;

struct Calls {
    std::atomic<uint64_t> launches = 0, event_records = 0, stream_queries = 0;
};
inline Calls calls;

inline thread_local bool in_host_function = false;
CUcontext current_context();

enum Needs { NOTHING, DRIVER, CONTEXT };

// Runs the body of a function, which may throw for lack of memory or threads.
template <class Body>
CUresult entered(Needs needs, Body&& body) noexcept {
    if (needs >= DRIVER && !settings.initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs >= DRIVER && in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    if (needs >= CONTEXT && !current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    if (needs >= CONTEXT && settings.failed != CUDA_SUCCESS) return settings.failed;
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    } catch (const std::system_error&) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
}

}  // namespace ringcomm::emulated
