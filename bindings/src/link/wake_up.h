// How a process sleeps so that the others of its host can wake it: on a datagram socket.
#pragma once

#include <string>

#include "link/descriptor.h"

namespace ringcomm {

// At an abstract address, which has no permissions: whoever sends there without need ends a sleep early, no more.
class WakeUp : public Descriptor {
public:
    // `name`: the same in all processes that wake each other, and in no others.
    WakeUp(const std::string& name, int process);

    void wake(int process) const;
    bool clear() const;  // afterwards the socket is not readable; returns whether it was

private:
    const std::string prefix_;
};

}  // namespace ringcomm
