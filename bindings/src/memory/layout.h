// The layout of shared memory. Each word has one writer (or is a compare-and-swap), has a cache line of its own and is
// never reset: it starts at zero, because a new range of the file reads as zeros, and counts on across calls.
//
//   arena of a communicator = | GroupHeader | part of rank 0 | part of rank 1 | … |
//   part of a rank          = | RankHeader | counts | packet rings | byte rings | staging buffers |
//                             | FlightBetweenHosts |
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/flight.h"
#include "core/signature.h"
#include "kernels/memory_order.h"
#include "p2p/channel.h"

namespace ringcomm {

constexpr size_t LINE = 128;  // two cache lines: the adjacent-line prefetcher fetches pairs
// What mappings begin at, a multiple of the kernel's page: that of Arm servers may have 64 KiB.
#ifdef __aarch64__
constexpr size_t PAGE = 64 << 10;
#else
constexpr size_t PAGE = 4 << 10;
#endif
constexpr size_t RECORD_LINES = 8, RECORD_HEAD = 32, INLINE_BYTES = RECORD_LINES * 64 - RECORD_HEAD;

constexpr size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }
constexpr size_t round_up(size_t value, size_t unit) { return divide_up(value, unit) * unit; }

// How a rank can access the private memory of all others: not at all, through copies by the kernel (CMA), or by loads
// and stores, as a thread of the same process.
enum class Access : uint64_t { NONE, COPY, LOAD };

// The buffers of a rank that peers may access directly: see collectives/direct.h.
struct DirectBuffers {
    uint64_t source_location, target_location;  // ShmGroup::locate()
    Access access;                              // to these addresses, in the memory of this rank:
    const std::byte* source;
    std::byte* target;
};

// The start record of a call. Small collectives need one synchronization: a rank writes its record and payload, then
// the epoch; a rank that has read the epoch may read the rest.
//
// A rank compares the records of all ranks, of each call, but not always in that call: see CollectiveOp::verify(). It
// starts call e once it has compared those of call e - s / 2, where its group uses s slots. So, when all ranks have
// started that one, they have compared those of call e - s, and have nothing more to read in its slot, `epoch % s`.
constexpr uint64_t RECORDS = 64;
// The slots that a group of this many ranks uses. The records that a rank reads in turn are to stay in the cache of its
// core, a third of a MiB of them.
constexpr uint64_t record_slots(int ranks) {
    constexpr uint64_t CACHED = 512, LEAST = 4;
    return std::clamp(std::bit_floor(CACHED / uint64_t(ranks)), LEAST, RECORDS);
}
struct alignas(LINE) StartRecord {
    Flag epoch;
    Signature signature;
    std::byte payload[INLINE_BYTES];
    DirectBuffers buffers;  // if SIGNATURE_DIRECT is set
};
static_assert(offsetof(StartRecord, payload) == RECORD_HEAD,
              "up to 32 bytes the small path reads one cache line per peer");

// What a rank passes on in the tree of its group, up or down: see collectives/tree.h.
constexpr size_t RELAY_BYTES = LINE - sizeof(Flag) - sizeof(Signature);
struct alignas(LINE) Relay {
    Flag epoch;
    Signature signature;
    std::byte payload[RELAY_BYTES];
};

// The futex word on which a rank sleeps; doorbell.h defines `sleeper`. A publisher makes no system call unless a thread
// sleeps.
struct alignas(LINE) Doorbell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleeper;
};

enum RankState : uint32_t { RANK_OPEN = 0, RANK_CLOSED = 1 };

struct RankHeader {
    StartRecord records[RECORDS];
    Relay up[2], down[2];              // of call `epoch & 1`
    alignas(LINE) Flag staged;         // position of the last chunk that this rank staged
    alignas(LINE) Flag reduced;        // … whose segment it reduced
    alignas(LINE) Flag collected;      // … that it took from its peers
    alignas(LINE) Flag finished;       // last epoch this rank has fully completed
    std::atomic<int32_t> core;         // in the arena of the world: where this rank was seen last, plus 1; 0: unknown
    std::atomic<int32_t> node, cache;  // likewise: its Domain
    std::atomic<uint64_t> yielded;     // likewise: when it last yielded that core, ns
    std::atomic<uint32_t> accesses_peers;  // 1 while this rank may access buffers of its peers
    alignas(
        LINE) std::atomic<uint32_t> state;  // all ranks read it in every send, so no word that changes shares its line
    std::atomic<uint32_t> takes_part;       // 1 once this rank has called shrink
    std::atomic<uint32_t> detached;         // 1 once it no longer accesses this arena
    std::atomic<int32_t> member;            // its rank in the world, which all ranks write
    std::atomic<int64_t> pid;
    std::atomic<uint32_t> is_between_hosts;        // 1 once its FlightBetweenHosts is there
    std::atomic<uint64_t> secret, secret_address;  // in the arena of the world only: see cma.h
    Doorbell doorbell;                             // of the one collective that may run
    Doorbell p2p_doorbell;                         // of point-to-point, any number of threads
    alignas(LINE) FlightRecord flight;
};

// What a rank does in the group of several hosts whose ranks on this host are those of this arena; that in RankHeader
// has the calls by which it does its part on this host. Memory only where there is such a group.
struct FlightBetweenHosts {
    int32_t group_size, process, processes;  // that the link connects, of which this rank is one
    std::atomic<uint32_t> left;              // in the arena of the world: 1 once the process is connected to no other
    std::atomic<uint64_t> finished;          // the last epoch that it has finished
    alignas(LINE) FlightRecord record;
};
constexpr size_t BETWEEN_HOSTS_BYTES = round_up(sizeof(FlightBetweenHosts), PAGE);  // the last ones of a part

// The first failure of a communicator; it stays, and every later call on any rank raises it.
struct SharedFailure {
    std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
    int32_t
        between;  // 0, or a group of so many ranks on several hosts has failed, by whose numbers `error` names ranks
    rc_error error;
};

// By which `ringcomm top`, perhaps of another version, knows an arena: "ringcom5". The digit changes with the layout.
constexpr uint64_t ARENA_MAGIC = 0x356d6f63676e6972;

struct alignas(PAGE) GroupHeader {
    std::atomic<uint64_t> magic;
    std::atomic<uint64_t> part_bytes;
    std::atomic<int> size;
    std::atomic<uint64_t> nonce;
    std::atomic<uint64_t> file_end;   // of the world: the next free byte of the file
    std::atomic<uint64_t> successor;  // the offset of the list of the survivors: see shrink.h
    SharedFailure failure;
};

static_assert(offsetof(GroupHeader, failure) == 48 && sizeof(RankHeader) == 108032 &&
                  offsetof(RankHeader, flight) == 42368 && sizeof(FlightBetweenHosts) == 65792,
              "the layout has moved: change ARENA_MAGIC");

struct alignas(LINE) Packet {
    Flag sequence;  // from 1; written last
    PacketHeader header;
    std::byte payload[LINE - sizeof(Flag) - sizeof(PacketHeader)];
};

// Point-to-point from one writer, in whose part it lies, to one reader: see shm/rings.h.
struct alignas(LINE) PacketRing {
    // Written by the reader.
    Flag consumed;              // packets
    std::atomic<bool> copying;  // from the memory of the writer
    // Written by the writer.
    Packet packets[PACKETS];
};

}  // namespace ringcomm
