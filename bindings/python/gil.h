// When a call of the core releases the GIL.
#pragma once
#include <Python.h>

#include <utility>

#include "core/waiting.h"

namespace ringcomm {

// Returns the status of a call of the core, which runs without the GIL.
template <class Call>
int without_gil(Call call) {
    PyThreadState* const thread = PyEval_SaveThread();
    const int status = call();
    PyEval_RestoreThread(thread);
    return status;
}

// Until end(), this thread releases the GIL only once a call of the core has to wait: to release it takes longer than a
// small call that need not. No destructor takes it back: that may end a daemon thread, which no destructor may.
class KeepsGil {
public:
    KeepsGil() : outer_(std::exchange(current, this)), outer_wait_(std::exchange(before_wait, release)) {}
    KeepsGil(const KeepsGil&) = delete;

    void end() const {
        before_wait = outer_wait_;
        current = outer_;
        if (thread_) PyEval_RestoreThread(thread_);
    }

private:
    static void release() { current->thread_ = PyEval_SaveThread(); }

    static inline constinit thread_local KeepsGil* current = nullptr;
    KeepsGil* const outer_;  // a signal handler may make calls while this thread waits
    const BeforeWait outer_wait_;
    PyThreadState* thread_ = nullptr;
};

// The same as without_gil() for a call that moves so many bytes.
template <class Call>
int run_core(uint64_t bytes, Call call) {
    if (bytes > LITTLE_BYTES) return without_gil(call);
    const KeepsGil keeps;
    const int status = call();
    keeps.end();
    return status;
}

}  // namespace ringcomm
