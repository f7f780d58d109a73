// A library that this process opens when it needs it, and the functions that are called in it.
#pragma once

#include <dlfcn.h>

#include <string>

#include "core/errors.h"

namespace ringcomm {

class SharedLibrary {
public:
    // The path or the name of its file. `needs`: what an error says of a function that is missing.
    SharedLibrary(const std::string& file, const char* needs)
        : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)), needs_(needs) {
        if (!handle_) throw Failure(RC_ARGUMENT, dlerror());  // it names the file
    }
    SharedLibrary(const SharedLibrary&) = delete;

    void* find(const char* name) const {
        void* const found = dlsym(handle_, name);
        if (!found) throw Failure(RC_ARGUMENT, format("there is no %s: %s", name, needs_));
        return found;
    }
    // In which this function is.
    std::string path_of(const char* name) const {
        Dl_info found{};
        dladdr(find(name), &found);
        return found.dli_fname ? found.dli_fname : "";
    }

private:
    void* const handle_;  // never closed: its threads may run
    const char* const needs_;
};

template <class Type>
class SharedFunction {
public:
    SharedFunction(const SharedLibrary& library, const char* name)
        : call_(reinterpret_cast<Type*>(library.find(name))) {}

    template <class... Arguments>
    auto operator()(Arguments... arguments) const {
        return call_(arguments...);
    }

private:
    Type* call_;
};

}  // namespace ringcomm
