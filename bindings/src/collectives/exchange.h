// The common pattern of the fused collectives over shared memory.
//
// In each chunk of an exchange, every writer stages a block in its own buffer, and every reader collects from the
// writers' buffers. An array of one chunk costs one synchronization, because the start record publishes chunk 0. The
// exceptions are large all_reduce and reduce (reduce.cpp), and the direct paths, which stage nothing.
#pragma once

#include <algorithm>

#include "collectives/direct.h"

namespace ringcomm {

inline void reduce_blocks(const CallRecord& call, std::byte* target, const void* const* sources, int n,
                          uint64_t count) {
    if (count) kernels().reduce[call.dtype][call.op](target, sources, n, count, call.factor);
}

struct Roles {
    int writer, reader;
};

// stage(chunk) fills this rank's buffer, collect(chunk) reads those of the writers, and try_direct() does the whole
// call if it can. chunks() is called after await_starts(). A buffer of chunk 0 has `staged_bytes`.
template <class Chunks, class Stage, class Collect, class TryDirect>
void exchange(CollectiveOp& op, const Roles& roles, DirectAccess& direct, size_t staged_bytes, Chunks chunks,
              Stage stage, Collect collect, TryDirect try_direct) {
    const bool writes = includes(roles.writer, op.rank), reads = includes(roles.reader, op.rank);
    const auto stage_first = [&] {
        if (writes) stage(0);
    };
    if (!direct.start(staged_bytes, stage_first)) return;
    op.await_starts(reads ? staged_bytes : 0);
    if (op.awaited == ALL_RANKS && try_direct()) return direct.finish();
    direct.decline();
    if (writes && direct.wanted()) {
        stage(0);
        op.publish_staged(1);
    }
    const uint64_t end = chunks();
    op.check_chunk_count(end);
    op.set_path(RC_PATH_STAGED, end);
    for (uint64_t chunk = 0; chunk < end; ++chunk) {
        const uint64_t next = chunk + 1;
        if (writes && next < end) {
            for (int p = 0; p < op.size && next >= 2; ++p) {
                if (p != op.rank && includes(roles.reader, p)) op.await_collected(p, next - 1);
            }
            stage(next);
            op.publish_staged(next + 1);
        }
        if (!reads) continue;
        for (int p = 0; p < op.size; ++p) {
            if (p != op.rank && includes(roles.writer, p)) op.await_staged(p, chunk);
        }
        collect(chunk);
        if (end > 2) op.publish_collected(chunk + 1);
    }
}

// How a large block is divided into pieces that fit a staging buffer.
struct Chunking {
    size_t piece;  // bytes, a multiple of 64

    // Between two ranks a buffer holds two segments, 1 MiB: a line that is staged again has left the private cache of
    // its reader by then (all_reduce of 4 MiB on Zen 4: 430 us in place of 500). Among more ranks it holds less, so
    // that the buffers of all ranks fit the shared cache together.
    Chunking(CollectiveOp& op, int blocks_per_buffer) {
        const size_t segment = op.group.tuning().segment_bytes;
        const size_t all_blocks = std::max(segment, 4 * segment / op.size);
        const size_t buffer = std::min<size_t>(all_blocks, op.group.arena().layout.staging_bytes);
        piece = std::max<size_t>(64, std::min(segment, buffer / blocks_per_buffer) / 64 * 64);
    }
    uint64_t chunks(size_t largest) const { return std::max<size_t>(1, divide_up(largest, piece)); }
    size_t begin(uint64_t chunk, size_t bytes) const { return std::min(bytes, chunk * piece); }
    size_t length(uint64_t chunk, size_t bytes) const {
        return std::min(bytes, (chunk + 1) * piece) - begin(chunk, bytes);
    }
};

// One slot per reader in a staging buffer, packed so that small blocks share pages and cache lines.
struct Slots {
    const CollectiveOp& op;
    const Chunking& chunking;
    const Blocks& blocks;
    size_t stride, total;

    Slots(const CollectiveOp& op, const Chunking& chunking, const Blocks& blocks, size_t largest)
        : op(op), chunking(chunking), blocks(blocks) {
        const size_t most = std::min(chunking.piece, largest);
        stride = most * op.size <= INLINE_BYTES ? most : round_up(most, 64);
        total = stride * op.size;
    }

    // Stages piece k of each peer's block.
    void stage(uint64_t k) const {
        std::byte* buffer = op.staging(op.rank, k, total);
        for (int p = 0; p < op.size; ++p) {
            if (p == op.rank) continue;
            const size_t bytes = blocks.bytes(p);
            op.copy_in(buffer + p * stride, op.call.source + blocks.offset(p) + chunking.begin(k, bytes),
                       chunking.length(k, bytes));
        }
    }

    // Piece k of the block of rank `writer` for this rank.
    const std::byte* source(int writer, uint64_t k) const {
        if (writer != op.rank) return op.staging(writer, k, total) + op.rank * stride;
        return op.call.source + blocks.offset(writer) + chunking.begin(k, blocks.bytes(writer));
    }
};

// reduce.cpp: all_reduce and reduce
void reduce_one_shot(CollectiveOp& op, int reader);
void reduce_in_two_stages(CollectiveOp& op, int reader);

}  // namespace ringcomm
