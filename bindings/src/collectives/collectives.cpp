// The fused collectives that are one exchange each, and the dispatch to all.
#include "core/collectives.h"
#include "collectives/exchange.h"

namespace ringcomm {

namespace {

constexpr uint64_t REFRESH = uint64_t{1} << 32;  // calls

void barrier(CollectiveOp& op) {
    op.set_path(RC_PATH_STAGED);
    op.publish_start();
    op.await_starts();
}

void broadcast(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const size_t bytes = call.bytes();
    const Chunking chunking(op, 1);
    DirectAccess direct(op, {op.rank == call.root ? bytes : 0, 0, bytes});
    exchange(
        op, {call.root, ALL_RANKS}, direct, chunking.length(0, bytes), [&] { return chunking.chunks(bytes); },
        [&](uint64_t k) {
            const size_t length = chunking.length(k, bytes);
            op.copy_in(op.staging(op.rank, k, length), call.source + chunking.begin(k, bytes), length);
        },
        [&](uint64_t k) {
            if (op.rank == call.root) return;
            const size_t length = chunking.length(k, bytes);
            copy_out(call.target + chunking.begin(k, bytes), op.staging(call.root, k, length), length, bytes);
        },
        [&] {
            if (!direct.negotiate({call.root, NO_RANK})) return false;
            if (op.rank != call.root) direct.copy_source(call.root, 0, call.target, bytes);
            return true;
        });
}

// gather and all_gather differ only in the readers.
void gather(CollectiveOp& op, int reader) {
    const CallRecord& call = op.call;
    const Blocks blocks(call);
    const size_t mine = blocks.bytes(op.rank), all = blocks.offset(op.size);
    const Chunking chunking(op, 1);
    DirectAccess direct(op, {mine, reader == ALL_RANKS ? all : 0, blocks.largest(op.size), true});
    exchange(
        op, {ALL_RANKS, reader}, direct, chunking.length(0, blocks.largest(op.size)),
        [&] { return chunking.chunks(blocks.largest(op.size)); },
        [&](uint64_t k) {
            const size_t length = chunking.length(k, mine);
            op.copy_in(op.staging(op.rank, k, length), call.source + chunking.begin(k, mine), length);
        },
        [&](uint64_t k) {
            for (int p = 0; p < op.size; ++p) {
                const size_t bytes = blocks.bytes(p), begin = chunking.begin(k, bytes),
                             length = chunking.length(k, bytes);
                const std::byte* source = p == op.rank ? call.source + begin : op.staging(p, k, length);
                copy_out(call.target + blocks.offset(p) + begin, source, length, all);
            }
        },
        [&] {
            if (reader == ALL_RANKS && direct.negotiate({NO_RANK, ALL_RANKS})) {  // push: one block into every target
                for (int p = 0; p < op.size; ++p)
                    copy_block(direct.target(p) + blocks.offset(op.rank), call.source, mine);
                return true;
            }
            if (!direct.negotiate({ALL_RANKS, NO_RANK})) return false;
            if (includes(reader, op.rank)) {
                for (int p = 0; p < op.size; ++p) {
                    direct.copy_source(p, 0, call.target + blocks.offset(p), blocks.bytes(p));
                }
            }
            return true;
        });
}

void scatter(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const Blocks blocks(call);
    const Chunking chunking(op, op.size);
    const Slots slots(op, chunking, blocks, blocks.largest(op.size));
    const size_t mine = blocks.bytes(op.rank);
    // With two ranks, staging overlaps both copies; with more, the root would stage for all, so CMA pays off.
    const size_t all = op.rank == call.root ? blocks.offset(op.size) : 0;
    DirectAccess direct(op, {all, 0, blocks.largest(op.size), op.size > 2});
    exchange(
        op, {call.root, ALL_RANKS}, direct, slots.total, [&] { return chunking.chunks(blocks.largest(op.size)); },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            copy_out(call.target + chunking.begin(k, mine), slots.source(call.root, k), chunking.length(k, mine), mine);
        },
        [&] {
            if (!direct.negotiate({call.root, NO_RANK})) return false;
            direct.copy_source(call.root, blocks.offset(op.rank), call.target, mine);
            return true;
        });
}

void all_to_all(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const int n = op.size, me = op.rank;
    const Blocks sent(call), received(call, call.counts ? call.counts + n : nullptr);
    // The longest block of any pair determines the number of chunks. It is known only after await_starts(), so chunk 0
    // is staged in slots of full size.
    const Chunking chunking(op, n);
    const bool uneven = call.counts != nullptr;
    const Slots slots(op, chunking, sent, uneven ? chunking.piece : call.bytes());
    const bool in_place = call.source == call.target;
    // In place, a block would be overwritten before its reader has copied it.
    DirectAccess direct(op, {in_place ? 0 : sent.offset(n), 0, in_place ? 0 : sent.largest(n), true});
    exchange(
        op, {ALL_RANKS, ALL_RANKS}, direct, slots.total,
        [&] {
            size_t longest = call.bytes();
            for (int p = 0; uneven && p < n; ++p) {
                longest = std::max(longest, Blocks(call, op.comm.arena().counts(p, call.epoch)).largest(n));
            }
            return chunking.chunks(longest);
        },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            for (int p = 0; p < n; ++p) {
                const size_t bytes = received.bytes(p);
                copy_out(call.target + received.offset(p) + chunking.begin(k, bytes), slots.source(p, k),
                         chunking.length(k, bytes), received.offset(n));
            }
        },
        [&] {
            if (!direct.negotiate({ALL_RANKS, NO_RANK})) return false;
            for (int p = 0; p < n; ++p) {
                const Blocks theirs(call, uneven ? op.comm.arena().counts(p, call.epoch) : nullptr);
                direct.copy_source(p, theirs.offset(me), call.target + received.offset(p), received.bytes(p));
            }
            return true;
        });
}

void reduce_scatter(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const int n = op.size, me = op.rank;
    const Blocks blocks(call);
    const Chunking chunking(op, n);
    const Slots slots(op, chunking, blocks, blocks.largest(n));
    const size_t mine = blocks.bytes(me);
    const void** sources = op.comm.sources.data();
    DirectAccess direct(op, {blocks.offset(n), 0, blocks.largest(n)});
    exchange(
        op, {ALL_RANKS, ALL_RANKS}, direct, slots.total, [&] { return chunking.chunks(blocks.largest(n)); },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            for (int p = 0; p < n; ++p) sources[p] = slots.source(p, k);
            reduce_blocks(call, call.target + chunking.begin(k, mine), sources, n,
                          chunking.length(k, mine) / call.item);
        },
        [&] {
            if (!direct.negotiate({ALL_RANKS, NO_RANK})) return false;
            for (int p = 0; p < n; ++p) sources[p] = direct.source(p) + blocks.offset(me);
            reduce_blocks(call, call.target, sources, n, mine / call.item);
            return true;
        });
}

// A group of one rank.
void alone(const CallRecord& call) {
    const void* source = call.source;
    const size_t all = Blocks(call).bytes(0);
    if (call.collective == RC_ALL_TO_ALL && call.counts && call.counts[0] != call.counts[1]) {
        throw Failure(RC_MISMATCH,
                      format("rank 0 sends %zu elements to itself, but expects %zu", size_t(call.counts[0]),
                             size_t(call.counts[1])),
                      0);
    }
    if (collectives[call.collective].reduces) return reduce_blocks(call, call.target, &source, 1, all / call.item);
    copy_block(call.target, call.source, all);
}

void run(CollectiveOp& op) {
    const CallRecord& call = op.call;
    if (op.size == 1) {
        op.set_path(RC_PATH_SINGLE);
        return alone(call);
    }
    switch (call.collective) {
        case RC_BARRIER: return barrier(op);
        case RC_BROADCAST: return broadcast(op);
        case RC_REDUCE: return reduce_to(op, call.root);
        case RC_ALL_REDUCE: return reduce_to(op, ALL_RANKS);
        case RC_GATHER: return gather(op, call.root);
        case RC_SCATTER: return scatter(op);
        case RC_ALL_GATHER:
        case RC_SPLIT:
        case RC_EMPTY: return gather(op, ALL_RANKS);
        case RC_REDUCE_SCATTER: return reduce_scatter(op);
        case RC_ALL_TO_ALL: return all_to_all(op);
    }
}

}  // namespace

void Comm::run_collective(const CallRecord& call) {
    CollectiveOp op(*this, call);
    if (call.epoch % REFRESH == 0) op.refresh_flags();
    const auto finish = [&] { mine().finished.store(call.epoch, std::memory_order_release); };
    try {
        run(op);
    } catch (const Failure& failure) {
        // Otherwise the call is not finished: this rank still owes data to its peers.
        if (failure.error.code == RC_MISMATCH || failure.error.code == RC_ARGUMENT) finish();
        throw;
    }
    finish();
}

}  // namespace ringcomm
