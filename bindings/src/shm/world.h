// What all communicators of a rank share.
#pragma once

#include <memory>

#include "core/peer_group.h"
#include "machine/placement.h"
#include "memory/arena.h"
#include "memory/cma.h"
#include "memory/heap.h"
#include "shm/liveness.h"

namespace ringcomm {

class World {
public:
    World(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce, const rc_tuning& tuning);
    World(const World&) = delete;

    // The file holds the arena of the world, a heap of each rank up to here, and what is reserved later.
    static uint64_t heaps_end(int size, const rc_tuning& tuning);
    uint64_t reserve(uint64_t bytes);  // a new range of the file

    const std::shared_ptr<File> file;
    const uint64_t nonce;  // random, the same on all ranks
    const rc_tuning tuning;
    const std::shared_ptr<Arena> arena;
    Heaps heaps;
    Cma cma;
    Placement placement;
    Liveness liveness;
    const std::shared_ptr<Drains> drains = std::make_shared<Drains>();
};

}  // namespace ringcomm
