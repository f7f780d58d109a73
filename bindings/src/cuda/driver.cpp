#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "core/errors.h"

namespace ringcomm {
namespace {

template <class Function>
void find(void* library, const char* path, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) rejectf("library: expected a CUDA driver of 12.0 or later, got %s, which lacks %s", path, name);
}

Driver load(const char* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) rejectf("library: expected a CUDA driver, got %s: %s", path, dlerror());
    Driver driver{};
#define RC_FUNCTION(name) find(library, path, #name, driver.name);
    RC_LAUNCH_FUNCTIONS(RC_FUNCTION)
#undef RC_FUNCTION
    return driver;
}

}  // namespace

const Driver& open_driver(const char* library) {
    static std::mutex mutex;
    static std::map<std::string, std::unique_ptr<const Driver>> opened;
    const std::lock_guard lock(mutex);
    auto& driver = opened[library];
    if (!driver) driver = std::make_unique<const Driver>(load(library));
    return *driver;
}

void Driver::check(CUresult status, const char* what) const {
    if (status != CUDA_SUCCESS) [[unlikely]]
        throw Failure(RC_SYSTEM, format("%s: ", what) + describe(status));
}

std::string Driver::describe(CUresult status) const {
    const char *name = nullptr, *sentence = nullptr;
    cuGetErrorName(status, &name);
    cuGetErrorString(status, &sentence);
    return format("%s (%s)", name ? name : "an unknown error", sentence ? sentence : "no description");
}

}  // namespace ringcomm
