// A link carries data between the processes of a job: over sockets (sockets.h), or by the messages of MPI or UCX
// (message_link.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace ringcomm {

// A send or receive in flight. The caller keeps it, and its memory, until it has ended.
struct LinkTransfer {
    enum State : uint8_t { ACTIVE, DONE, FAILED };  // FAILED: the peer is lost, or cancel() was called

    std::atomic<State> state{DONE};
    void* handle = nullptr;  // the link's own

    bool ended() const { return state != ACTIVE; }
    // Ends a transfer, if it is waited for; from then on nobody waits for it.
    static void end(LinkTransfer*& waiting, State state) {
        if (!waiting) return;
        waiting->handle = nullptr;
        std::exchange(waiting, nullptr)->state = state;
    }
};

// What a link reports from within progress().
class LinkEvents {
public:
    virtual void packet_arrived(int peer, std::span<const std::byte> packet) = 0;
    // Once per peer: nothing arrives from it any more, and its transfers have failed.
    virtual void peer_lost(int peer, const std::string& reason) = 0;
    // The link itself has queued a packet to the peer, see Link::has_queued().
    virtual void packet_queued(int) {}

protected:
    ~LinkEvents() = default;
};

// One thread at a time may call a link; its owner has a mutex for that. Only sleep() and wake() may run beside other
// calls.
class Link {
public:
    static constexpr size_t MAX_PACKET = 128 << 10;

    Link(int rank, int size) : rank(rank), size(size) {}
    virtual ~Link() = default;
    Link(const Link&) = delete;

    const int rank, size;

    // Transfers between two processes with the same tag (not 0) match in the order of the calls. Both sides give the
    // same length. A send may begin before its receive.
    virtual void send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) = 0;
    virtual void receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) = 0;
    // Ends a transfer: afterwards the link does not touch its memory, unless it is stuck. What the peer still sends for
    // it is discarded.
    virtual void cancel(LinkTransfer& transfer) = 0;
    // What peers still send with this tag is discarded, and so a receive with it fails: it would get a later piece. A
    // MessageLink ends this after ten seconds, since it asks its library for each of these tags.
    virtual void drop(uint64_t tag) = 0;
    // Whether the sends of peers may wait until progress(), on any thread, has discarded them.
    virtual bool dropping() const { return false; }
    // Whether a canceled transfer may still touch its memory.
    virtual bool stuck() const { return false; }

    // Long transfers are cut into pieces of this length, on both sides alike: a piece is combined, in the caches, while
    // the next arrive, and it delays the packets behind it.
    virtual size_t piece_bytes() const { return 256 << 10; }
    // How many pieces may be on their way at once, in each direction.
    static constexpr size_t MOST_WINDOW = 32;
    virtual size_t window() const { return 4; }

    // A packet has at most MAX_PACKET bytes, is copied at once, and arrives as an event, in order between two
    // processes.
    virtual void send_packet(int peer, std::span<const std::byte> packet) = 0;
    // False while the peer takes its packets slowly, or is not connected yet: whoever can should wait.
    virtual bool has_room(int peer) const = 0;
    // Whether this process is connected to the peer; if not, what is sent to it, or received from it, asks for that.
    virtual bool connected(int) const { return true; }
    virtual void connect(int) {}
    // Whether something sent waits for a connection.
    virtual bool connecting() const { return false; }
    // Whether packets to the peer leave this process only in progress(), which any thread may call.
    virtual bool has_queued(int) const { return false; }

    // Moves whatever can move without waiting; returns whether anything did.
    virtual bool progress(LinkEvents& events) = 0;
    // Returns once something may be able to move, after wake() on another thread, after wake_peer() in another process
    // of this host, or after `ns`.
    virtual void sleep(uint64_t ns) = 0;
    virtual void wake() = 0;
    // Whatever arrives wakes; a packet this short is for nobody.
    virtual void wake_peer(int peer) { send_packet(peer, std::array<std::byte, 1>{}); }
    // Whether everything sent has reached the hosts of the peers: to end the link then loses nothing.
    virtual bool flushed() const = 0;
    // In a forked child: gives up what would keep the connections open when the parent has ended.
    virtual void after_fork() = 0;
};

}  // namespace ringcomm
