// SendRing and ReceiveRing: the two ends of the rings from one rank to another.
#include "shm/rings.h"

#include <cstring>

#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

constexpr size_t UNIT = 64;  // alignment of payloads in the ring of bytes

}  // namespace

SendRing::SendRing(Arena& arena, int writer, int reader, uint64_t nontemporal_bytes)
    : ring_(arena.packet_ring(writer, reader)),
      bytes_(arena.byte_ring(writer, reader)),
      capacity_(arena.layout.ring_bytes),
      stores_(nontemporal_bytes) {}

bool SendRing::try_write(PacketHeader header, const std::byte* payload) {
    const size_t bytes = payload ? header.bytes : 0;
    uint64_t end = end_;
    const bool apart = bytes > sizeof Packet::payload;
    if (apart) {
        const size_t to_end = capacity_ - end_ % capacity_;
        header.location = bytes > to_end ? end_ + to_end : end_;  // contiguous
        end = header.location + round_up(bytes, UNIT);
    }
    if (!has_room(end)) {
        consumed_ = observe(ring_.consumed);
        if (consumed_) free_from_ = ends_[(consumed_ - 1) % PACKETS];
        if (!has_room(end)) return false;
    }
    Packet& packet = ring_.packets[written_ % PACKETS];
    std::byte* place = apart ? bytes_ + header.location % capacity_ : packet.payload;
    stores_.copy(place, payload, bytes, 1.2);
    packet.header = header;
    end_ = ends_[written_ % PACKETS] = end;
    publish<SITE_PACKET>(packet.sequence, ++written_);
    return true;
}

ReceiveRing::ReceiveRing(Arena& arena, int writer, int reader)
    : ring_(arena.packet_ring(writer, reader)),
      bytes_(arena.byte_ring(writer, reader)),
      capacity_(arena.layout.ring_bytes) {}

bool ReceiveRing::consume() {
    const bool apart = in_byte_ring(ring_.packets[consumed_ % PACKETS].header);
    ++consumed_;
    if (!apart && consumed_ - reported_ < PACKETS / 4) return false;
    publish<SITE_CONSUMED>(ring_.consumed, reported_ = consumed_);
    return true;
}

}  // namespace ringcomm
