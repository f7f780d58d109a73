// From one rank to another: a ring of packets, and a ring of bytes for payloads too large for a packet.
//
// Each packet carries its sequence number, so the reader polls the cache line that it then reads. The reader reports
// consumed packets only when the writer may need their room.
#pragma once

#include <array>

#include "core/stores.h"
#include "memory/arena.h"

namespace ringcomm {

class SendRing {
public:
    SendRing(Arena& arena, int writer, int reader, uint64_t nontemporal_bytes);

    // Returns false if the ring has no room. `payload`: header.bytes bytes, or nullptr.
    bool try_write(PacketHeader header, const std::byte* payload);
    // Whether the reader is copying from the writer's memory.
    bool is_being_read() const { return ring_.copying.load(); }

private:
    bool has_room(uint64_t end) const { return written_ - consumed_ < PACKETS && end - free_from_ <= capacity_; }

    PacketRing& ring_;
    std::byte* const bytes_;
    const size_t capacity_;
    StagingStores stores_;
    uint64_t written_ = 0, consumed_ = 0;   // packets; the latter as last reported by the reader
    uint64_t end_ = 0, free_from_ = 0;      // positions in the ring of bytes; they never wrap
    std::array<uint64_t, PACKETS> ends_{};  // end_ after each packet
};

class ReceiveRing {
public:
    ReceiveRing(Arena& arena, int writer, int reader);

    // The next packet, or nullptr.
    const Packet* next() const {
        const Packet& packet = ring_.packets[consumed_ % PACKETS];
        return observe(packet.sequence) == consumed_ + 1 ? &packet : nullptr;
    }
    const std::byte* payload(const Packet& packet) const {
        const PacketHeader& header = packet.header;
        return in_byte_ring(header) ? bytes_ + header.location % capacity_ : packet.payload;
    }
    // Releases the next packet. Returns true if the writer was notified.
    bool consume();
    void set_copying(bool now) { ring_.copying.exchange(now); }

private:
    static bool in_byte_ring(const PacketHeader& header) {
        return header.has_payload() && header.bytes > sizeof Packet::payload;
    }

    PacketRing& ring_;
    const std::byte* const bytes_;
    const size_t capacity_;
    uint64_t consumed_ = 0, reported_ = 0;
};

}  // namespace ringcomm
