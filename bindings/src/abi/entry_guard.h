// Counts the threads inside a communicator, so that close() can wait for them.
#pragma once

#include <exception>

#include "abi/check.h"
#include "abi/communicator.h"

namespace ringcomm {

class EntryGuard {
public:
    explicit EntryGuard(CommHandle& handle) : handle_(handle) {
        if (handle.forked()) {
            throw Failure(RC_CLOSED,
                          "this communicator belongs to the parent process; after a fork the child must call "
                          "ringcomm.init for itself");
        }
        handle.inside.fetch_add(1);
        if (!handle.closed.load()) return;
        handle.inside.fetch_sub(1);
        throw Failure(RC_CLOSED, "this communicator is closed");
    }
    ~EntryGuard() {
        if (std::uncaught_exceptions() && group().has_failed()) [[unlikely]]
            handle_.raised.store(true);
        handle_.inside.fetch_sub(1);
    }
    EntryGuard(const EntryGuard&) = delete;

    PeerGroup& group() const { return *handle_.state->group; }
    CommState* operator->() const { return handle_.state.get(); }

private:
    CommHandle& handle_;
};

// A handler must not wait for calls queued behind the interrupted one.
inline void reject_in_signal_handler(const PeerGroup& group) {
    if (!group.interrupted_here()) return;
    reject(
        "a signal handler must not wait for the communicator that it interrupted; expected abort(), close() or an "
        "exception");
}

}  // namespace ringcomm
