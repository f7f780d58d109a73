// What all communicators of a rank share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "shm/arena.h"
#include "shm/cma.h"
#include "shm/liveness.h"

namespace ringcomm {

class World {
public:
    World(int fd, int size, const int64_t* pids, const int* pidfds, const rc_tuning& tuning);
    World(const World&) = delete;

    uint64_t reserve(uint64_t bytes);  // a new range of the file

    // Every long wait calls these functions, one per communicator: they receive the messages that have come, so that
    // no sender waits for a rank that waits for something else.
    void register_drain(const void* owner, std::function<void()> drain);
    void unregister_drain(const void* owner);  // `drain` does not run afterwards
    void drain_all();

    const std::shared_ptr<File> file;
    const rc_tuning tuning;
    const std::shared_ptr<Arena> arena;
    Cma cma;
    Liveness liveness;

private:
    std::mutex drains_mutex_;
    std::map<const void*, std::function<void()>> drains_;
};

}  // namespace ringcomm
