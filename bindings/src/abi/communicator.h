// What a handle of a communicator holds.
#pragma once

#include <atomic>
#include <memory>

#include "collectives/queue.h"
#include "p2p/engine.h"

namespace ringcomm {

// The state of one rank of one communicator, until close().
struct CommState {
    const std::unique_ptr<PeerGroup> group;
    CollectiveQueue collectives{*group};
    PointToPointEngine p2p{*group};
};

// Keeps the state alive while calls run.
struct CommHandle {
    explicit CommHandle(std::unique_ptr<PeerGroup> group) : state(new CommState{std::move(group)}) {}

    std::shared_ptr<CommState> state;
    const uint64_t generation = fork_generation.load();
    std::atomic<bool> closed{false};
    std::atomic<int> inside{0};
    std::atomic<bool> raised{false};  // a call has raised the failure of the group

    bool forked() const { return generation != fork_generation.load(std::memory_order_relaxed); }
};

}  // namespace ringcomm
