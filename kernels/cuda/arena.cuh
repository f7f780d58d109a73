// The arena: all memory of one rank that its peers reach, in one allocation. A channel is a block of the grid on every
// rank; it has flags, staging and slots of its own, so blocks of one rank never wait for each other.
//
//   who writes          what
//   host                peers: where each rank's arena is mapped here; all else starts as zeros
//   owner               broken; per channel: epoch, sent, received
//   peer p              per channel, in the places of p: start, arrived, taken, stage, line, slots
//
// Flags lie 32 bytes apart, a sector of the GPU's cache. Nothing is ever reset but the lines (call.cuh).
#pragma once

#include "port.cuh"

namespace ringcomm::cuda {

// What a host chooses; all ranks the same. Sizes in bytes, multiples of 16.
struct Shape {
    int32_t ranks, channels;
    uint32_t slots;        // at least 3, or the ring stands still (ring.cuh)
    uint32_t slot_bytes;   // at least 16 for each rank
    uint32_t stage_bytes;  // of one-shot and two-shot: what one rank stages for another at once
    uint32_t line_bytes;   // of LL: the same, as data
};

// Who talks: all ranks in a collective; or two of them, of whom one offers a message and the other grants the room.
enum Lane { COLLECTIVE, OFFER, GRANT, LANES };

enum Traffic { BETWEEN_ALL, BETWEEN_TWO, TRAFFICS };  // a collective, a message

constexpr uint64_t FLAG = 32;  // a start word has another word beside it

// Where things lie in an arena, and in a channel of it. Worked out by the host: a kernel finds it among its constants.
struct Layout {
    Shape shape;
    uint32_t pair_bytes;  // of a slot when all peers share them
    uint64_t channels_at, channel_bytes, bytes;
    uint64_t flags_at, stage_at, lines_at, slots_at;
};

RC_SHARED bool valid(const Shape& s) {
    const uint32_t sizes = s.slot_bytes | s.stage_bytes | s.line_bytes;
    return s.ranks > 0 && s.channels > 0 && s.slots >= 3 && s.slot_bytes >= PACK * s.ranks && s.stage_bytes &&
           s.line_bytes && sizes % PACK == 0;
}

RC_SHARED Layout lay_out(const Shape& s) {
    const auto lines_of_cache = [](uint64_t bytes) { return (bytes + 127) / 128 * 128; };
    const uint64_t n = s.ranks;
    Layout l{};
    l.shape = s;
    l.pair_bytes = static_cast<uint32_t>(s.slot_bytes / n / PACK * PACK);
    l.channels_at = lines_of_cache(128 + n * sizeof(byte*));
    l.flags_at = lines_of_cache((1 + 2 * n) * sizeof(uint64_t));
    l.stage_at = lines_of_cache(l.flags_at + (2 * LANES + 2 * TRAFFICS) * n * FLAG);
    l.lines_at = l.stage_at + 2 * n * s.stage_bytes;
    l.slots_at = l.lines_at + 2 * n * 2 * s.line_bytes;  // a word of flag beside each word of data
    l.channel_bytes = lines_of_cache(l.slots_at + uint64_t(s.slots) * s.slot_bytes);
    l.bytes = l.channels_at + s.channels * l.channel_bytes;
    return l;
}

// The places of one channel in the arena of one rank.
struct Channel {
    byte* base;
    const Layout& layout;

    RC_SHARED uint64_t* epoch() const { return reinterpret_cast<uint64_t*>(base); }
    RC_SHARED uint64_t* sent(int peer) const { return epoch() + 1 + peer; }
    RC_SHARED uint64_t* received(int peer) const { return epoch() + 1 + layout.shape.ranks + peer; }
    RC_SHARED uint64_t* start(Lane lane, uint64_t epoch, int from) const { return flag(2 * lane + epoch % 2, from); }
    RC_SHARED uint64_t* arrived(Traffic traffic, int from) const { return flag(2 * LANES + traffic, from); }
    RC_SHARED uint64_t* taken(Traffic traffic, int by) const { return flag(2 * LANES + TRAFFICS + traffic, by); }
    RC_SHARED byte* stage(uint64_t epoch, int from) const {
        return base + layout.stage_at + place(epoch, from) * layout.shape.stage_bytes;
    }
    RC_SHARED uint64_t* lines(uint64_t epoch, int from) const {
        return reinterpret_cast<uint64_t*>(base + layout.lines_at + place(epoch, from) * 2 * layout.shape.line_bytes);
    }
    RC_SHARED byte* slots() const { return base + layout.slots_at; }
    RC_SHARED byte* pair_slots(int from) const {
        return slots() + uint64_t(from) * layout.shape.slots * layout.pair_bytes;
    }

private:
    RC_SHARED uint64_t place(uint64_t epoch, int from) const { return epoch % 2 * layout.shape.ranks + from; }
    RC_SHARED uint64_t* flag(uint64_t row, int rank) const {
        return reinterpret_cast<uint64_t*>(base + layout.flags_at + (row * layout.shape.ranks + rank) * FLAG);
    }
};

struct Arena {
    byte* base;
    Layout layout;

    RC_SHARED uint32_t* broken() const { return reinterpret_cast<uint32_t*>(base); }
    RC_SHARED byte** peers() const { return reinterpret_cast<byte**>(base + 128); }
    RC_SHARED Channel channel(int c) const { return at(base, c); }
    // As channel c of another rank, whose arena is mapped at `there`.
    RC_SHARED Channel at(byte* there, int c) const {
        return {there + layout.channels_at + c * layout.channel_bytes, layout};
    }
};

}  // namespace ringcomm::cuda
