// What lies in shared memory. Every word has one writer (or is a compare-and-swap), lives on a line of its own, and is
// never reset: all start at zero because a new range of the file reads as zeros, and counters run on across calls.
//
//   arena of a communicator = | GroupHeader | part of rank 0 | part of rank 1 | … |
//   part of a rank          = | RankHeader | counts | channels | rings | staging buffers |
#pragma once

#include <cstddef>
#include <cstdint>

#include "port.h"
#include "ringcomm.h"

namespace ringcomm {

constexpr size_t LINE = 128;  // two cache lines: the adjacent-line prefetcher fetches pairs
constexpr size_t PAGE = 4096;
constexpr size_t RECORD_LINES = 8, RECORD_HEAD = 32, INLINE_BYTES = RECORD_LINES * 64 - RECORD_HEAD;
constexpr int FLIGHT_CALLS = 1024;

constexpr size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }
constexpr size_t round_up(size_t value, size_t unit) { return divide_up(value, unit) * unit; }

// How a rank can get at the private memory of all others: not at all, by copies that the kernel makes, or, as a thread
// of the same process, like at its own.
enum class Access : uint64_t { NONE, COPY, LOAD };

// Where a rank's buffers are, for those who access them directly: see kernels/cpu/direct.h.
struct Places {
    uint64_t source_key, target_key;  // in the file; 0 if not symmetric
    Access access;                    // what may be done with these addresses, in the memory of this rank:
    const std::byte* source;
    std::byte* target;
};

// The start record of a call. One synchronisation carries the small collectives: a rank writes its record and payload,
// then the epoch; whoever has read the epoch may read the rest. Slot `epoch & 1`: the slot is written again two calls
// later, when every rank has finished this one.
struct alignas(LINE) Record {
    Flag epoch;
    uint64_t signature;  // collective, dtype, op, root: see call.h
    uint64_t count;
    uint64_t extra;  // premul_sum's factor, a hash of counts
    std::byte payload[INLINE_BYTES];
    Places places;  // if SIGNATURE_DIRECT is set
};
static_assert(offsetof(Record, payload) == RECORD_HEAD, "up to 32 bytes the small path reads one cache line per peer");

// Where a rank sleeps; see waiting.h for what `sleeper` holds. A publisher makes no system call unless somebody sleeps.
struct alignas(LINE) Bell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleeper;
};

struct alignas(64) FlightEntry {
    std::atomic<uint64_t> number;  // written last; 0 while the entry changes
    std::atomic<uint64_t> signature;
    std::atomic<uint64_t> epoch;
    std::atomic<uint64_t> count;
    std::atomic<uint64_t> start;  // ns, tick_ns()
    std::atomic<uint64_t> end;    // 0 while the call runs
    std::atomic<uint32_t> status;
};

enum RankState : uint32_t { RANK_OPEN = 0, RANK_CLOSED = 1 };

struct RankHeader {
    Record records[2];
    alignas(LINE) Flag staged;                     // position of the last chunk that this rank laid down
    alignas(LINE) Flag reduced;                    // … whose segment it reduced
    alignas(LINE) Flag collected;                  // … that it took from its peers
    alignas(LINE) Flag finished;                   // the last epoch it is through with: it owes nothing up to here
    alignas(LINE) std::atomic<uint32_t> state;     // read by all in every send, so it shares no line with what changes
    std::atomic<uint64_t> secret, secret_address;  // in the arena of the world only: see reach.h
    alignas(LINE) std::atomic<uint64_t> flights;
    std::atomic<int32_t> waits_for;  // a rank + 1, or 0; set only when a wait gets long
    std::atomic<uint32_t> intrudes;  // 1 while it uses the private memory of other threads of its process
    Bell bell;                       // of the one collective that may run
    Bell letter_bell;                // of point-to-point, any number of threads
    FlightEntry flight[FLIGHT_CALLS];
};

// The first failure of a communicator; it stays, and every later call on any rank raises it.
struct SharedFailure {
    std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
    rc_error error;
};

struct alignas(PAGE) GroupHeader {
    std::atomic<uint64_t> nonce;
    std::atomic<int> departed;       // ranks that will not touch this arena again
    std::atomic<uint64_t> file_end;  // of the world: the next free byte of the file
    SharedFailure failure;
};

enum LetterKind : uint32_t {
    LETTER_MESSAGE,  // with its payload
    LETTER_OFFER,    // of a message that is too large to travel at once; if the reader may fetch it, it lies at `place`
                     // in the sender's memory
    LETTER_WANTED,   // an answer to an offer: send it in pieces
    LETTER_REFUSED,  // … it does not fit the receive
    LETTER_FETCHED,  // … the receiver has read it from the sender's memory
    LETTER_PIECE,    // of the message offered, with its payload
};

struct Heading {
    uint32_t kind, dtype;
    int64_t tag;
    uint64_t bytes;
    uint64_t number;  // of the offer, and of what answers it; they count up from 1
    uint64_t place;   // of a payload too large for the letter: its position in the ring
};

struct alignas(LINE) Letter {
    Flag stamp;  // which one it is, from 1; written last
    Heading heading;
    std::byte payload[LINE - sizeof(Flag) - sizeof(Heading)];
};

// Point-to-point, from the writer in whose part it lies to one reader: see channel.h.
constexpr uint64_t LETTERS = 32;
struct alignas(LINE) Channel {
    // Written by the reader.
    Flag taken;                 // letters
    std::atomic<bool> reading;  // it copies from the memory of the writer, a thread of the same process
    // Written by the writer.
    Letter letters[LETTERS];
};

}  // namespace ringcomm
