// What a SocketLink tells the thread that makes its connections: which ones it wants, and which flows have ended.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "link/descriptor.h"

namespace ringcomm {

class ConnectionRequests {
public:
    struct Wanted {
        int peer, flow;  // 0: none of the flows, but the connection of the pair
    };
    struct EndedFlow {
        int peer;
        size_t left;
        std::string reason;
    };

    ConnectionRequests();

    int descriptor() const { return event_.fd; }  // readable while there is anything to take
    void want(Wanted connection);
    void flow_ended(EndedFlow flow);
    std::vector<Wanted> take_wanted(size_t most);
    std::optional<EndedFlow> take_ended_flow();
    void close() { event_.close(); }  // in a forked child

private:
    Descriptor event_;
    std::vector<Wanted> wanted_;
    std::deque<EndedFlow> ended_flows_;
};

}  // namespace ringcomm
