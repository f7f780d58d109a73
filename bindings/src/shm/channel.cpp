// The channel between two ranks that share memory.
#include "shm/channel.h"

#include <algorithm>

namespace ringcomm {

namespace {

// The kernel pays per page of a CMA read, so only huge pages are read from another process: in 4 KiB pages, 16 MiB take
// 2.4 ms, against 1.1 ms in DATA packets (Zen 5, both ranks sending). Two ranks with a core each share the work of DATA
// packets, which take 0.6 to 0.95 of the time in huge pages, too, up to some 8 MiB.
constexpr size_t MIN_CMA_BYTES = 8 << 20, MIN_CMA_BYTES_ON_SHARED_CORES = 256 << 10;

constexpr size_t MOST_EAGER = 128 << 10;  // the receiver may have to keep any number of them

// An offered location is an address of the peer, or an offset in the file beside this bit, which no address has.
constexpr uint64_t IN_FILE = uint64_t{1} << 63;

}  // namespace

// A message of up to half the ring always finds room in the end, so it can be sent eagerly: a CTS would have to wake
// this rank, which takes long on a busy core. A DATA packet is a quarter of the ring: the writer fills one while the
// reader empties another.
ShmChannel::ShmChannel(ShmGroup& group, int peer)
    : PacketChannel(std::min(group.arena().layout.ring_bytes / 2, MOST_EAGER), group.arena().layout.ring_bytes / 4),
      group_(group),
      peer_(peer),
      member_(group.memory().members[peer]),
      doorbell_(group.header(peer).p2p_doorbell),
      out_(group.arena(), group.rank, peer, group.tuning().nontemporal_bytes),
      in_(group.arena(), peer, group.rank) {}

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

uint64_t ShmChannel::offer_memory(const std::byte* data, size_t bytes) {
    const uint64_t offset = bytes >= group_.tuning().direct_bytes ? group_.locate(data, bytes) : 0;
    if (offset) return IN_FILE | offset;
    return offers_address(data, bytes) ? reinterpret_cast<uintptr_t>(data) : 0;
}

bool ShmChannel::reads_memory(uint64_t location) {
    return (location & IN_FILE) || group_.world->cma.available(member_);
}

// The page in the middle is taken for all.
bool ShmChannel::offers_address(const std::byte* data, size_t bytes) {
    Cma& cma = group_.world->cma;
    const rc_tuning& tuning = group_.tuning();
    const std::byte* middle = data + bytes / 2;
    if (bytes >= tuning.direct_bytes && cma.same_process(member_)) return true;
    // The user's own cma_bytes holds for all pages.
    if (tuning.cma_bytes == tuning.cma_huge_bytes) return bytes >= tuning.cma_bytes && cma.readable(middle);
    return bytes >= (tuning.oversubscribed ? MIN_CMA_BYTES_ON_SHARED_CORES : MIN_CMA_BYTES) && cma.in_huge_page(middle);
}

PacketChannel::Read ShmChannel::read_memory(std::byte* target, uint64_t location, size_t bytes) {
    Cma& cma = group_.world->cma;
    const bool in_file = location & IN_FILE, loads = in_file || cma.same_process(member_);
    const auto mapped = in_file ? group_.resolve(location & ~IN_FILE) : nullptr;  // first: it may fail
    const auto read = [&] {
        const auto address = reinterpret_cast<const std::byte*>(location);
        if (!loads) return cma.read(member_, target, address, bytes);
        output_stores_.copy(target, in_file ? mapped.get() : address, bytes);
        return true;
    };
    in_.set_copying(loads);  // the peer keeps its memory during this copy
    const bool done = memory_valid() && read();
    in_.set_copying(false);
    // If the peer is dead, its pid, and so the memory read, may belong to another process.
    if (!memory_valid() || group_.world->liveness.dead(member_)) return Read::PENDING;
    return done ? Read::DONE : Read::REFUSED;
}

void ShmChannel::end_access() {
    while (out_.is_being_read() && group_.runs(peer_)) yield_core();
}

// False once a sender may have released its buffer.
bool ShmChannel::memory_valid() const { return !group_.has_failed() && !group_.closed(peer_); }

}  // namespace ringcomm
