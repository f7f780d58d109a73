// The channel between two ranks that share memory.
#include "shm/channel.h"

#include <cstring>

namespace ringcomm {

namespace {

// The kernel pays per page of a CMA read, so only huge pages are read from another process: in 4 KiB pages, 16 MiB take
// 2.4 ms, against 1.1 ms in DATA packets (Zen 5, both ranks sending).
constexpr size_t MIN_CMA_BYTES = 256 << 10;

}  // namespace

// A message of up to half the ring always finds room in the end, so it is sent eagerly: a CTS would have to wake this
// rank, which takes long on a busy core. A DATA packet is an eighth of the ring: the writer fills one while the reader
// empties another.
ShmChannel::ShmChannel(Comm& comm, int peer)
    : PacketChannel(comm.arena().layout.ring_bytes / 2, comm.arena().layout.ring_bytes / 8),
      comm_(comm),
      peer_(peer),
      member_(comm.group().members[peer]),
      doorbell_(comm.header(peer).p2p_doorbell),
      out_(comm.arena(), comm.rank, peer, comm.tuning().nontemporal_bytes),
      in_(comm.arena(), peer, comm.rank) {}

bool ShmChannel::try_write(const PacketHeader& header, const std::byte* payload) {
    if (!out_.try_write(header, payload)) return false;
    notify_peer();
    return true;
}

ReceivedPacket ShmChannel::next() {
    const Packet* packet = in_.next();
    if (!packet) return {};
    return {&packet->header, in_.payload(*packet)};
}

bool ShmChannel::consume() {
    if (!in_.consume()) return false;
    notify_peer();
    return true;
}

// The page in the middle is taken for all.
bool ShmChannel::offers_memory(const std::byte* data, size_t bytes) {
    Cma& cma = comm_.world->cma;
    const rc_tuning& tuning = comm_.tuning();
    const std::byte* middle = data + bytes / 2;
    if (bytes >= tuning.direct_bytes && cma.same_process(member_)) return true;
    // The user's own cma_bytes holds for all pages.
    if (tuning.cma_bytes == tuning.cma_huge_bytes) return bytes >= tuning.cma_bytes && cma.readable(middle);
    return bytes >= MIN_CMA_BYTES && cma.in_huge_page(middle);
}

PacketChannel::Read ShmChannel::read_memory(std::byte* target, const std::byte* address, size_t bytes) {
    Cma& cma = comm_.world->cma;
    const bool same_process = cma.same_process(member_);
    const auto read = [&] {
        if (!same_process) return cma.read(member_, target, address, bytes);
        memcpy(target, address, bytes);
        return true;
    };
    in_.set_copying(same_process);  // a thread keeps its memory during this copy; a process may not
    const bool done = memory_valid() && read();
    in_.set_copying(false);
    // If the peer is dead, its pid, and so the memory read, may belong to another process.
    if (!memory_valid() || comm_.world->liveness.dead(member_)) return Read::PENDING;
    return done ? Read::DONE : Read::REFUSED;
}

void ShmChannel::end_access() {
    while (out_.is_being_read()) yield_core();
}

// False once a sender may have released its buffer.
bool ShmChannel::memory_valid() const { return !comm_.has_failed() && !comm_.closed(peer_); }

}  // namespace ringcomm
