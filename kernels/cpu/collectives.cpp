// The fused collectives that are one exchange each, and the way to all of them.
#include "exchange.h"

namespace ringcomm {

namespace {

void barrier(Round& round) {
    round.goes(RC_EXCHANGE);
    round.start();
    round.meet();
}

void broadcast(Round& round) {
    const Call& call = round.call;
    const size_t bytes = call.bytes();
    const Pieces pieces(round, 1);
    Direct direct(round, {round.rank == call.root ? bytes : 0, 0, bytes});
    exchange(
        round, {call.root, EVERYBODY}, direct, pieces.length(0, bytes), [&] { return pieces.chunks(bytes); },
        [&](uint64_t k) {
            const size_t length = pieces.length(k, bytes);
            round.copy_in(round.laid(round.rank, k, length), call.source + pieces.begin(k, bytes), length);
        },
        [&](uint64_t k) {
            if (round.rank == call.root) return;
            const size_t length = pieces.length(k, bytes);
            copy_out(call.target + pieces.begin(k, bytes), round.laid(call.root, k, length), length, bytes);
        },
        [&] {
            if (!direct.agreed({call.root, NO_ONE})) return false;
            if (round.rank != call.root) direct.copy_source(call.root, 0, call.target, bytes);
            return true;
        });
}

// gather and all_gather: they differ in who reads.
void gather(Round& round, int reader) {
    const Call& call = round.call;
    const Blocks blocks(call);
    const size_t mine = blocks.bytes(round.rank), all = blocks.offset(round.size);
    const Pieces pieces(round, 1);
    Direct direct(round, {mine, reader == EVERYBODY ? all : 0, blocks.largest(round.size), true});
    exchange(
        round, {EVERYBODY, reader}, direct, pieces.length(0, blocks.largest(round.size)),
        [&] { return pieces.chunks(blocks.largest(round.size)); },
        [&](uint64_t k) {
            const size_t length = pieces.length(k, mine);
            round.copy_in(round.laid(round.rank, k, length), call.source + pieces.begin(k, mine), length);
        },
        [&](uint64_t k) {
            for (int p = 0; p < round.size; ++p) {
                const size_t bytes = blocks.bytes(p), begin = pieces.begin(k, bytes), length = pieces.length(k, bytes);
                const std::byte* source = p == round.rank ? call.source + begin : round.laid(p, k, length);
                copy_out(call.target + blocks.offset(p) + begin, source, length, all);
            }
        },
        [&] {
            if (reader == EVERYBODY && direct.agreed({NO_ONE, EVERYBODY})) {  // push: one block into every target
                for (int p = 0; p < round.size; ++p)
                    copy_block(direct.target(p) + blocks.offset(round.rank), call.source, mine);
                return true;
            }
            if (!direct.agreed({EVERYBODY, NO_ONE})) return false;
            if (is(reader, round.rank)) {
                for (int p = 0; p < round.size; ++p) {
                    direct.copy_source(p, 0, call.target + blocks.offset(p), blocks.bytes(p));
                }
            }
            return true;
        });
}

void scatter(Round& round) {
    const Call& call = round.call;
    const Blocks blocks(call);
    const Pieces pieces(round, round.size);
    const Slots slots(pieces, blocks.largest(round.size), round.size);
    const size_t mine = blocks.bytes(round.rank);
    // With two ranks, one copies out while the other copies in; with more, the root would copy in for all.
    const size_t all = round.rank == call.root ? blocks.offset(round.size) : 0;
    Direct direct(round, {all, 0, blocks.largest(round.size), round.size > 2});
    exchange(
        round, {call.root, EVERYBODY}, direct, slots.total, [&] { return pieces.chunks(blocks.largest(round.size)); },
        [&](uint64_t k) {
            std::byte* buffer = round.laid(round.rank, k, slots.total);
            for (int p = 0; p < round.size; ++p) {
                const size_t bytes = blocks.bytes(p), begin = pieces.begin(k, bytes);
                if (p == round.rank) continue;
                round.copy_in(buffer + p * slots.stride, call.source + blocks.offset(p) + begin,
                              pieces.length(k, bytes));
            }
        },
        [&](uint64_t k) {
            const size_t begin = pieces.begin(k, mine);
            const std::byte* source = round.rank == call.root
                                          ? call.source + blocks.offset(round.rank) + begin
                                          : round.laid(call.root, k, slots.total) + round.rank * slots.stride;
            copy_out(call.target + begin, source, pieces.length(k, mine), mine);
        },
        [&] {
            if (!direct.agreed({call.root, NO_ONE})) return false;
            direct.copy_source(call.root, blocks.offset(round.rank), call.target, mine);
            return true;
        });
}

void all_to_all(Round& round) {
    const Call& call = round.call;
    const int n = round.size, me = round.rank;
    const Blocks sent(call), received(call, call.counts ? call.counts + n : nullptr);
    // The longest block between any two ranks decides the number of chunks; its length is known to all after meet(),
    // and before it only chunk 0 is laid, into slots of full size.
    const Pieces pieces(round, n);
    const bool uneven = call.counts != nullptr;
    const Slots slots(pieces, uneven ? pieces.piece : call.bytes(), n);
    const bool in_place = call.source == call.target;
    // In place, a block would be overwritten before its reader has it.
    Direct direct(round, {in_place ? 0 : sent.offset(n), 0, in_place ? 0 : sent.largest(n), true});
    exchange(
        round, {EVERYBODY, EVERYBODY}, direct, slots.total,
        [&] {
            size_t longest = call.bytes();
            for (int p = 0; uneven && p < n; ++p) {
                longest = std::max(longest, Blocks(call, round.comm.arena().counts(p, call.epoch)).largest(n));
            }
            return pieces.chunks(longest);
        },
        [&](uint64_t k) {
            std::byte* buffer = round.laid(me, k, slots.total);
            for (int p = 0; p < n; ++p) {
                const size_t bytes = sent.bytes(p);
                if (p == me) continue;
                round.copy_in(buffer + p * slots.stride, call.source + sent.offset(p) + pieces.begin(k, bytes),
                              pieces.length(k, bytes));
            }
        },
        [&](uint64_t k) {
            for (int p = 0; p < n; ++p) {
                const size_t bytes = received.bytes(p), begin = pieces.begin(k, bytes);
                const std::byte* source =
                    p == me ? call.source + sent.offset(me) + begin : round.laid(p, k, slots.total) + me * slots.stride;
                copy_out(call.target + received.offset(p) + begin, source, pieces.length(k, bytes), received.offset(n));
            }
        },
        [&] {
            if (!direct.agreed({EVERYBODY, NO_ONE})) return false;
            for (int p = 0; p < n; ++p) {
                const Blocks theirs(call, uneven ? round.comm.arena().counts(p, call.epoch) : nullptr);
                direct.copy_source(p, theirs.offset(me), call.target + received.offset(p), received.bytes(p));
            }
            return true;
        });
}

void reduce_scatter(Round& round) {
    const Call& call = round.call;
    const int n = round.size, me = round.rank;
    const Blocks blocks(call);
    const Pieces pieces(round, n);
    const Slots slots(pieces, blocks.largest(n), n);
    const size_t mine = blocks.bytes(me);
    const void** sources = round.comm.sources.data();
    Direct direct(round, {blocks.offset(n), 0, blocks.largest(n)});
    exchange(
        round, {EVERYBODY, EVERYBODY}, direct, slots.total, [&] { return pieces.chunks(blocks.largest(n)); },
        [&](uint64_t k) {
            std::byte* buffer = round.laid(me, k, slots.total);
            for (int p = 0; p < n; ++p) {
                const size_t bytes = blocks.bytes(p);
                if (p == me) continue;
                round.copy_in(buffer + p * slots.stride, call.source + blocks.offset(p) + pieces.begin(k, bytes),
                              pieces.length(k, bytes));
            }
        },
        [&](uint64_t k) {
            const size_t begin = pieces.begin(k, mine);
            for (int p = 0; p < n; ++p) {
                sources[p] = p == me ? call.source + blocks.offset(me) + begin
                                     : round.laid(p, k, slots.total) + me * slots.stride;
            }
            reduce_blocks(call, call.target + begin, sources, n, pieces.length(k, mine) / call.item);
        },
        [&] {
            if (!direct.agreed({EVERYBODY, NO_ONE})) return false;
            for (int p = 0; p < n; ++p) sources[p] = direct.source(p) + blocks.offset(me);
            reduce_blocks(call, call.target, sources, n, mine / call.item);
            return true;
        });
}

// One rank: what the others would add is missing, the rest is the same.
void alone(const Call& call) {
    const void* source = call.source;
    const size_t all = Blocks(call).bytes(0);
    if (call.collective == RC_ALL_TO_ALL && call.counts && call.counts[0] != call.counts[1]) {
        throw Failure(RC_MISMATCH,
                      format("rank 0 sends %zu elements to itself, but expects %zu", size_t(call.counts[0]),
                             size_t(call.counts[1])),
                      0);
    }
    switch (call.collective) {
        case RC_REDUCE:
        case RC_ALL_REDUCE:
        case RC_REDUCE_SCATTER: return reduce_blocks(call, call.target, &source, 1, all / call.item);
        case RC_BARRIER:
        case RC_BROADCAST: return;
        default: copy_block(call.target, call.source, all);
    }
}

}  // namespace

void run_collective(Round& round) {
    const Call& call = round.call;
    if (round.size == 1) {
        round.goes(RC_ALONE);
        return alone(call);
    }
    switch (call.collective) {
        case RC_BARRIER: return barrier(round);
        case RC_BROADCAST: return broadcast(round);
        case RC_REDUCE: return reduce_to(round, call.root);
        case RC_ALL_REDUCE: return reduce_to(round, EVERYBODY);
        case RC_GATHER: return gather(round, call.root);
        case RC_SCATTER: return scatter(round);
        case RC_ALL_GATHER:
        case RC_SPLIT:
        case RC_EMPTY: return gather(round, EVERYBODY);
        case RC_REDUCE_SCATTER: return reduce_scatter(round);
        case RC_ALL_TO_ALL: return all_to_all(round);
    }
}

}  // namespace ringcomm
