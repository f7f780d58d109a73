// PacketChannel: carries packets to one peer and from it, in order. Over shared memory it is a pair of rings; a group
// of another kind brings its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

enum PacketKind : uint32_t {
    PACKET_EAGER,  // a whole message
    PACKET_RTS,    // announces a message, and maybe where the receiver can read it
    PACKET_CTS,    // answers an RTS: send DATA
    PACKET_NACK,   // answers an RTS: the size or dtype does not match the receive
    PACKET_FIN,    // answers an RTS: the receiver has read the sender's memory, or has no room for the message
    PACKET_DATA,   // a piece of an announced message
    PACKET_CLOSE,  // the sender is about to close: no message follows
    // Of messages on GPUs (gpu.h):
    PACKET_ARENA,     // how the receiver can access the memory of the sender
    PACKET_STAGED,    // a chunk of an announced message is in a slot
    PACKET_RELEASED,  // a slot may be used again
    PACKET_OWN,       // a message of a rank to itself; no channel carries it
};

struct PacketHeader {
    uint32_t kind, dtype;
    int64_t tag;
    uint64_t bytes;     // of the message; in a DATA packet, of the piece
    uint64_t number;    // of the RTS, from 1, also in its answers
    uint64_t location;  // of an RTS: offer_memory(), or on the GPU; of an EAGER or DATA packet: the channel's own

    bool has_payload() const { return kind == PACKET_EAGER || kind == PACKET_DATA || kind == PACKET_ARENA; }
};

struct ReceivedPacket {
    const PacketHeader* header = nullptr;
    const std::byte* payload = nullptr;  // header->bytes, if the packet has one
};

// The most packets that a channel holds whose consume() returns true.
constexpr uint64_t PACKETS = 32;

// Only the engine calls a channel, under its lock.
class PacketChannel {
public:
    PacketChannel(size_t eager_bytes, size_t data_bytes) : eager_bytes(eager_bytes), data_bytes(data_bytes) {}
    virtual ~PacketChannel() = default;
    PacketChannel(const PacketChannel&) = delete;

    const size_t eager_bytes;  // a larger message begins with an RTS
    const size_t data_bytes;   // the payload of a DATA packet, at most

    // Returns false if there is no room. `payload`: header.bytes, or nullptr; it is not read after the return.
    virtual bool try_write(const PacketHeader& header, const std::byte* payload) = 0;
    // The next packet, valid until consume().
    virtual ReceivedPacket next() = 0;
    // Releases the next packet. Returns true if other peers should have their turn.
    virtual bool consume() = 0;

    // Whether the peer is on this host: only then may the GPUs access each other.
    virtual bool on_this_host() const { return true; }

    // Direct access to the memory of the peer, where the channel has it.
    enum class Read {
        DONE,
        REFUSED,  // let the payload come in packets
        PENDING,  // asked again, with the same arguments, until a failure or the loss of the peer ends the wait
    };

    // Where the peer should read this payload in the memory of this rank; 0: it should get it in DATA packets.
    virtual uint64_t offer_memory(const std::byte*, size_t) { return 0; }
    // Whether to read what the peer offers.
    virtual bool reads_memory(uint64_t /*location*/) { return false; }
    // `location`: offered by the peer, plus the bytes that have been read.
    virtual Read read_memory(std::byte* /*target*/, uint64_t /*location*/, size_t) { return Read::REFUSED; }
    // After a failure: returns when neither rank accesses the memory of the other any more.
    virtual void end_access() {}
};

}  // namespace ringcomm
