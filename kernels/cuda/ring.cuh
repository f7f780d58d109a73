// The ring: every rank pushes to the next one only, so each link carries the least data. Of n segments, segment s
// starts at rank s + 1, is reduced at each hop and complete at rank s (reduce-scatter); then it goes round once more
// (all-gather). Each rank works on another segment at each step, and on half of it at a time: while it works on one
// half, the other is in flight.
//
//   step of rank r   0       1       …   n - 2   n - 1  |  n       …   2n - 3   2n - 2
//   receives         –       r - 2   …   r + 1   r      |  r - 1   …   r + 2    r + 1
//   sends            r - 1   r - 2   …   r + 1   r      |  r - 1   …   r + 2    –
//   outputs                                      r      |  r - 1   …   r + 2    r + 1
//
// A rank receives one half from its previous rank and sends one to its next rank in the same step, and two halves are
// sent before the first is received. With two slots every rank would wait for its next one to receive first: a
// deadlock. With three none waits.
#pragma once

#include "fifo.cuh"
#include "ranges.cuh"
#include "symmetric.cuh"

namespace ringcomm::cuda {

constexpr int HALVES = 2;

template <class Math>
struct Ring {
    const Call& call;
    const Math& math;
    RecvFifo prev;
    SendFifo next;

    RC_DEVICE Ring(const Call& call, const Math& math)
        : call(call), math(math), prev(call, ONE_PEER, rank_at(-1)), next(call, ONE_PEER, rank_at(1)) {}

    RC_DEVICE int rank_at(int distance) const { return (call.me + distance + call.n) % call.n; }
    RC_DEVICE uint64_t segment_bytes() const { return HALVES * prev.slot_bytes(); }

    // ---- One step of one half: receives a slot from the previous rank or not, reduces it with this rank's `own` input
    // or not (null), sends the result to the next rank or not, writes it to `to` or not (null). Two threads wait, and
    // later signal, side by side; the barriers order what all threads do in between.
    template <class M>
    RC_DEVICE bool step(const M& m, bool recv, const byte* own, bool send, byte* to, uint64_t bytes) {
        const Ctx& ctx = call.ctx;
        const bool receiver = recv && ctx.thread == 0, sender = send && ctx.thread == ctx.threads - 1;
        if (!block_all(ctx, (!receiver || prev.wait_data()) && (!sender || next.wait_slot()))) return false;
        const Operands operands{own, recv ? 1 : 0, prev.slot(), 0, recv + (own != nullptr), false};
        reduce(ctx, m, operands, Results{to, send ? next.slot() : nullptr, to != nullptr}, bytes);
        block_sync(ctx);
        if (receiver) prev.release();
        if (sender) next.post();
        prev.step += recv;
        next.step += send;
        return true;
    }

    // Reduces this rank's input with the received partial sum; `to` is for the complete sum only.
    RC_DEVICE bool recv_reduce_send(Range part, bool recv, bool send, byte* to) {
        return step(math, recv, call.args.input + part.begin, send, to, part.bytes());
    }
    // Forwards the received data, or sends this rank's `own`.
    RC_DEVICE bool recv_copy_send(Range part, const byte* own, bool send, byte* to) {
        return step(Copy(), !own, own, send, to == own ? nullptr : to, part.bytes());
    }

    RC_DEVICE static Range half(Range segment, int h) {
        const uint64_t bytes = round_up(divide_up(segment.bytes(), HALVES), PACK);
        return segment.part(h * bytes, (h + 1) * bytes);
    }

    // ---- The two passes; `segment(r)` is the range of segment r in the input, and in the output of all_gather.
    template <class Segment>
    RC_DEVICE bool reduce_scatter(Segment segment, bool forward, byte* to) {
        RC_NO_UNROLL for (int step = 0; step < call.n; ++step) RC_NO_UNROLL for (int h = 0; h < HALVES; ++h) {
            const bool last = step == call.n - 1;
            const Range part = half(segment(rank_at(-1 - step)), h);
            byte* sum = last ? to + half(Range{0, segment(call.me).bytes()}, h).begin : nullptr;
            if (!recv_reduce_send(part, step > 0, !last || forward, sum)) return false;
        }
        return true;
    }

    template <class Segment>
    RC_DEVICE bool all_gather(Segment segment) {
        RC_NO_UNROLL for (int step = 1; step < call.n; ++step) RC_NO_UNROLL for (int h = 0; h < HALVES; ++h) {
            const Range part = half(segment(rank_at(-step)), h);
            if (!recv_copy_send(part, nullptr, step < call.n - 1, call.args.output + part.begin)) return false;
        }
        return true;
    }
};

template <class Math>
RC_DEVICE void ring_all_reduce(Call& call, const Math& math) {
    call.location = digest_of(call.args.input_location, call.args.output_location);
    if (!call.start(call.args.count)) return;
    if (call.symmetric()) return symmetric_all_reduce(call, math);
    Ring<Math> ring(call, math);
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    for (uint64_t at = mine.begin; at < mine.end; at += call.n * ring.segment_bytes()) {
        const Range chunk{at, minimum(mine.end, at + call.n * ring.segment_bytes())};
        const uint64_t bytes = round_up(divide_up(chunk.bytes(), call.n), PACK);
        const auto segment = [&](int r) { return chunk.part(r * bytes, (r + 1) * bytes); };
        if (!ring.reduce_scatter(segment, call.n > 1, call.args.output + segment(call.me).begin)) return;
        if (!ring.all_gather(segment)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_reduce_scatter(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.send_offsets, call.args.count, math.item};
    call.location = digest_of(call.args.input_location);
    if (!call.start(blocks.digest(call.n))) return;
    if (call.symmetric()) return symmetric_reduce_scatter(call, math, blocks);
    Ring<Math> ring(call, math);
    const Range mine = channel_part(call.ctx, blocks.largest(call.n));
    for (uint64_t at = mine.begin; at < mine.end; at += ring.segment_bytes()) {
        const uint64_t end = minimum(mine.end, at + ring.segment_bytes());
        const auto segment = [&](int r) { return blocks[r].part(at, end); };
        if (!ring.reduce_scatter(segment, false, call.args.output + at)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_all_gather(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.recv_offsets, call.args.count, math.item};
    call.location = digest_of(call.args.output_location);
    if (!call.start(blocks.digest(call.n))) return;
    if (call.symmetric()) return symmetric_all_gather(call, blocks);
    Ring<Math> ring(call, math);
    const Range mine = channel_part(call.ctx, blocks.largest(call.n));
    for (uint64_t at = mine.begin; at < mine.end; at += ring.segment_bytes()) {
        const uint64_t end = minimum(mine.end, at + ring.segment_bytes());
        const auto segment = [&](int r) { return blocks[r].part(at, end); };
        RC_NO_UNROLL for (int h = 0; h < HALVES; ++h) {
            const Range part = ring.half(segment(call.me), h);
            // An empty array may lie at address 0, which would mean that nothing is given here.
            const byte* given = call.args.input ? call.args.input : call.args.output;
            const byte* own = given + (part.begin - blocks[call.me].begin);
            if (!ring.recv_copy_send(part, own, call.n > 1, call.args.output + part.begin)) return;
        }
        if (!ring.all_gather(segment)) return;
    }
    call.end();
}

// Once along the ring, piece by piece: broadcast from the root to the rank before it, reduce from the rank after the
// root to the root. The last rank waits for the first piece to come through all others: with four pieces for each rank
// that adds less than a quarter. A piece fits into a slot, and feeds all threads of the block: so short arrays have
// fewer.
RC_DEVICE uint64_t piece_bytes(const Call& call, uint64_t bytes) {
    const Shape& shape = call.mine.layout.shape;
    const uint64_t piece = round_up(divide_up(bytes, 4 * call.n), PACK);
    return minimum(shape.slot_bytes, piece > shape.stage_bytes ? piece : shape.stage_bytes);
}

template <class Math>
RC_DEVICE void ring_broadcast(Call& call, const Math& math) {
    if (!call.start(call.args.count)) return;
    Ring<Math> ring(call, math);
    const bool first = call.me == call.args.root, last = ring.rank_at(1) == call.args.root;
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    const uint64_t piece = piece_bytes(call, mine.bytes());
    for (uint64_t at = mine.begin; at < mine.end; at += piece) {
        const Range part{at, minimum(mine.end, at + piece)};
        const byte* own = first ? call.args.input + at : nullptr;
        if (!ring.recv_copy_send(part, own, !last, call.args.output + at)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_reduce(Call& call, const Math& math) {
    if (!call.start(call.args.count)) return;
    Ring<Math> ring(call, math);
    const bool first = ring.rank_at(-1) == call.args.root, last = call.me == call.args.root;
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    const uint64_t piece = piece_bytes(call, mine.bytes());
    for (uint64_t at = mine.begin; at < mine.end; at += piece) {
        const Range part{at, minimum(mine.end, at + piece)};
        byte* to = last ? call.args.output + at : nullptr;
        if (!ring.recv_reduce_send(part, !first, !last, to)) return;
    }
    call.end();
}

}  // namespace ringcomm::cuda
