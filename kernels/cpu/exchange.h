// What the fused collectives over shared memory have in common.
//
// All but two have one shape, the exchange: in each chunk every writer lays a block down in its own staging buffer, and
// every reader takes what it needs from the buffers of the writers. What fits in one chunk costs one synchronisation,
// because the start record publishes chunk 0. The exceptions are all_reduce and reduce of large arrays (two_stage.cpp),
// and the direct forms on symmetric buffers, which need no staging at all.
#pragma once

#include <algorithm>

#include "direct.h"

namespace ringcomm {

constexpr size_t BEYOND_CACHES = 32 << 20;

// Into an output of `all` bytes. Where no cache holds that, with stores that do not fetch first what they overwrite: 5
// to 30 % faster there, and slower where a cache does hold it.
inline void copy_out(std::byte* target, const std::byte* source, size_t bytes, size_t all) {
    if (target == source || !bytes) return;
    if (all >= BEYOND_CACHES) {
        kernels().copy_stream(target, source, bytes);
    } else {
        memcpy(target, source, bytes);
    }
}

inline void reduce_blocks(const Call& call, std::byte* target, const void* const* sources, int n, uint64_t count) {
    if (count) kernels().reduce[call.dtype][call.op](target, sources, n, count, call.factor);
}

struct Roles {
    int writer, reader;
};

// `lay(chunk)` fills this rank's buffer, `take(chunk)` reads those of the writers, try_direct() does it all if it can.
// chunks() is asked once all ranks have met. A buffer of chunk 0 has `laid` bytes.
template <class Chunks, class Lay, class Take, class TryDirect>
void exchange(Round& round, const Roles& roles, Direct& direct, size_t laid, Chunks chunks, Lay lay, Take take,
              TryDirect try_direct) {
    const bool writes = is(roles.writer, round.rank), reads = is(roles.reader, round.rank);
    if (writes && !direct.hope()) lay(0);
    direct.start();
    round.meet(reads ? laid : 0);
    if (try_direct()) return direct.finish();
    if (writes && direct.hope()) {
        lay(0);
        round.staged(1);
    }
    const uint64_t end = chunks();
    round.check_chunks(end);
    round.goes(RC_EXCHANGE, end);
    for (uint64_t chunk = 0; chunk < end; ++chunk) {
        const uint64_t next = chunk + 1;
        if (writes && next < end) {
            for (int p = 0; p < round.size && next >= 2; ++p) {
                if (p != round.rank && is(roles.reader, p)) round.await_collected(p, next - 1);
            }
            lay(next);
            round.staged(next + 1);
        }
        if (!reads) continue;
        for (int p = 0; p < round.size; ++p) {
            if (p != round.rank && is(roles.writer, p)) round.await_staged(p, chunk);
        }
        take(chunk);
        if (end > 2) round.collected(chunk + 1);
    }
}

// A block of `bytes` in pieces: how a large block travels through a staging buffer.
struct Pieces {
    size_t piece;  // bytes, a multiple of 64

    // All blocks of a buffer together take two segments at most, so that the buffers of all ranks stay in the cache
    // they share: with 8 ranks they would be 64 MiB else.
    Pieces(Round& round, int blocks_per_buffer) {
        const size_t segment = round.comm.tuning().segment_bytes;
        const size_t buffer = std::min<size_t>(2 * segment, round.comm.arena().layout.staging_bytes);
        piece = std::max<size_t>(64, std::min(segment, buffer / blocks_per_buffer) / 64 * 64);
    }
    uint64_t chunks(size_t largest) const { return std::max<size_t>(1, divide_up(largest, piece)); }
    size_t begin(uint64_t chunk, size_t bytes) const { return std::min(bytes, chunk * piece); }
    size_t length(uint64_t chunk, size_t bytes) const {
        return std::min(bytes, (chunk + 1) * piece) - begin(chunk, bytes);
    }
};

// Slots for each reader in one staging buffer: as far apart as needed, so that small blocks share pages and lines.
struct Slots {
    size_t stride, total;

    Slots(const Pieces& pieces, size_t largest, int size) {
        const size_t most = std::min(pieces.piece, largest);
        stride = most * size <= INLINE_BYTES ? most : round_up(most, 64);
        total = stride * size;
    }
};

void reduce_to(Round& round, int reader);  // two_stage.cpp: all_reduce and reduce

}  // namespace ringcomm
