// What a MessageLink needs of a library that matches messages by sender and tag: MPI (mpi.h), or UCX (ucx.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ringcomm {

// Calls return a status, 0 for success. A request or a message found is kept as 64 bits.
class MessageLibrary {
public:
    struct Probed {
        bool found = false;
        uint64_t message = 0;
        size_t bytes = 0;
        int peer = -1;  // if the library tells
    };
    struct LostPeer {
        int peer, status;
    };

    virtual ~MessageLibrary() = default;

    virtual int send(const std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) = 0;
    virtual int receive(std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) = 0;
    // Once `done`, the request is used up, and the status is that of its message.
    virtual int test(uint64_t& request, bool& done) = 0;
    virtual void cancel(uint64_t request) = 0;
    // Nobody will test the request; its memory stays valid.
    virtual void forget(uint64_t) {}
    // Takes a message of this tag, from any peer, that no receive has matched.
    virtual int probe(uint64_t tag, Probed& probed) = 0;
    virtual int receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) = 0;
    virtual std::string describe(int status) const = 0;
    // Whether any thread may call at any time, one after another.
    virtual bool any_thread() const = 0;

    // What the calls above do not move themselves.
    virtual bool progress() { return false; }
    // Peers lost since the last call, apart from those that a status tells of.
    virtual std::vector<LostPeer> lost_peers() { return {}; }
    // As in Link.
    virtual void sleep(uint64_t ns) = 0;
    virtual void wake() = 0;
};

}  // namespace ringcomm
