// The handle of a network, whatever links its processes.
#pragma once

#include <memory>
#include <vector>

#include "abi/handles.h"
#include "link/message_link.h"
#include "link/sockets.h"
#include "network/group.h"

struct rc_network {
    std::shared_ptr<ringcomm::NetworkWorld> world;
    ringcomm::MessageLink* messages = nullptr;  // over MPI
    ringcomm::SocketLink* sockets = nullptr;
    const uint64_t generation = ringcomm::fork_generation.load();
    // Of the first communicator, under the mutex of the world.
    ringcomm::LocalRanks local{};
    std::vector<int> processes_here{};
};
