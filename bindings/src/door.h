// The way into a communicator: calls enter and leave, and close() waits until nobody is inside.
#pragma once

#include "check.h"
#include "engine.h"
#include "letters.h"

namespace ringcomm {

// What belongs to one rank of one communicator, until close().
struct Core {
    Comm comm;
    Engine engine{comm};
    Letters letters{comm};

    template <class... Arguments>
    explicit Core(Arguments&&... arguments) : comm(std::forward<Arguments>(arguments)...) {}
};

// Keeps close() from pulling the memory away under a running call.
struct Door {
    template <class... Arguments>
    explicit Door(Arguments&&... arguments) : core(std::make_unique<Core>(std::forward<Arguments>(arguments)...)) {}

    std::unique_ptr<Core> core;
    const uint64_t generation = fork_generation.load();
    std::atomic<bool> closed{false};
    std::atomic<int> inside{0};

    bool forked() const { return generation != fork_generation.load(std::memory_order_relaxed); }
};

class Visit {
public:
    explicit Visit(Door& door) : door_(door) {
        if (door.forked()) {
            throw Failure(RC_CLOSED,
                          "this communicator belongs to the parent process; after a fork the child must call "
                          "ringcomm.init for itself");
        }
        door.inside.fetch_add(1);
        if (!door.closed.load()) return;
        door.inside.fetch_sub(1);
        throw Failure(RC_CLOSED, "this communicator is closed");
    }
    ~Visit() { door_.inside.fetch_sub(1); }
    Visit(const Visit&) = delete;

    Comm& comm() const { return door_.core->comm; }
    Core* operator->() const { return door_.core.get(); }

private:
    Door& door_;
};

// Nothing that waits in line behind the interrupted call may be waited for.
inline void refuse_in_signal_handler(const Comm& comm) {
    if (!comm.interrupted_here()) return;
    refuse(
        "a signal handler may not wait for a communicator that it has interrupted: expected abort(), close() or an "
        "exception");
}

template <class Body>
int visit(const std::shared_ptr<Door>& door, Body body) {
    return guarded([&] {
        const Visit visit(*door);
        body(visit);
    });
}

}  // namespace ringcomm
