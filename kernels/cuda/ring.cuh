// The ring: every rank pushes to the next one only, so each link carries as little as can be. Of n segments, segment s
// starts at rank s + 1, is added to at each hop and complete at rank s (reduce-scatter); from there it goes round once
// more (all-gather). A rank is busy with another segment at each step, and with half of it at a time: while it works on
// one half, the other is on its way.
//
//   hop of rank r    0       1       …   n - 2   n - 1  |  n       …   2n - 3   2n - 2
//   takes            –       r - 2   …   r + 1   r      |  r - 1   …   r + 2    r + 1
//   pushes           r - 1   r - 2   …   r + 1   r      |  r - 1   …   r + 2    –
//   keeps                                        r      |  r - 1   …   r + 2    r + 1
//
// A rank takes a half from one neighbour and pushes one to the other in the same hop, and two halves are pushed before
// the first is taken: with two slots every rank would wait for its next one to take first; with three nobody does.
#pragma once

#include "blocks.cuh"
#include "pipe.cuh"
#include "symmetric.cuh"

namespace ringcomm::cuda {

constexpr int HALVES = 2;

template <class Math>
struct Ring {
    const Call& call;
    const Math& math;
    const byte* input;
    byte* output;
    Inlet in;
    Outlet out;

    RC_DEVICE Ring(const Call& call, const Math& math)
        : call(call),
          math(math),
          input(call.args.input),
          output(call.args.output),
          in(call, WHOLE, at(-1), call.epoch),
          out(call, WHOLE, at(1), call.epoch) {}

    RC_DEVICE int at(int distance) const { return (call.me + distance + call.n) % call.n; }
    RC_DEVICE uint64_t room() const { return HALVES * in.slot_bytes; }

    // ---- One hop: takes a slot from the previous rank or not, with this rank's `own` or not (null), pushes the result
    // to the next rank or not, keeps it or not. Two threads wait, and later publish, side by side; the barriers order
    // what all threads do in between.
    template <class M>
    RC_CALLED bool hop(const M& m, bool takes, const byte* own, bool pushes, byte* keep, uint64_t bytes) {
        const Ctx& ctx = call.ctx;
        const bool taker = takes && ctx.thread == 0, pusher = pushes && ctx.thread == ctx.threads - 1;
        if (!call.agreed((!taker || in.arrived()) && (!pusher || out.room()))) return false;
        const Operands operands{own, takes ? 1 : 0, in.slot(), 0, takes + (own != nullptr), false};
        reduce(ctx, m, operands, Results{keep, pushes ? out.slot() : nullptr, keep != nullptr}, bytes);
        block_sync(ctx);
        if (taker) in.took();
        if (pusher) out.filled();
        in.step += takes;
        out.step += pushes;
        return true;
    }

    // Adds this rank's input to what comes; `keep` is for the whole sum only.
    RC_DEVICE bool add(Range part, bool takes, bool pushes, byte* keep) {
        return hop(math, takes, input + part.begin, pushes, keep, part.bytes());
    }
    // Hands on what comes, or what is this rank's `own`.
    RC_DEVICE bool move(Range part, const byte* own, bool pushes, byte* keep) {
        return hop(Moving(), !own, own, pushes, keep == own ? nullptr : keep, part.bytes());
    }

    RC_DEVICE static Range half(Range segment, int h) {
        const uint64_t bytes = round_up(divide_up(segment.bytes(), HALVES), PACK);
        return segment.part(h * bytes, (h + 1) * bytes);
    }

    // ---- The two passes; `segment(r)` is where segment r lies in the input, and in the output of all_gather.
    template <class Segment>
    RC_DEVICE bool reduce_scatter(Segment segment, bool onward, byte* home) {
        RC_ROLL for (int step = 0; step < call.n; ++step) RC_ROLL for (int h = 0; h < HALVES; ++h) {
            const bool last = step == call.n - 1;
            const Range part = half(segment(at(-1 - step)), h);
            byte* keep = last ? home + half(Range{0, segment(call.me).bytes()}, h).begin : nullptr;
            if (!add(part, step > 0, !last || onward, keep)) return false;
        }
        return true;
    }

    template <class Segment>
    RC_DEVICE bool all_gather(Segment segment) {
        RC_ROLL for (int step = 1; step < call.n; ++step) RC_ROLL for (int h = 0; h < HALVES; ++h) {
            const Range part = half(segment(at(-step)), h);
            if (!move(part, nullptr, step < call.n - 1, output + part.begin)) return false;
        }
        return true;
    }
};

template <class Math>
RC_DEVICE void ring_all_reduce(Call& call, const Math& math) {
    call.place = place_of(call.args.input_place, call.args.output_place);
    if (!call.start(call.args.count)) return;
    if (call.together()) return symmetric_all_reduce(call, math);
    Ring<Math> ring(call, math);
    const Range mine = share(call.ctx, call.args.count * math.item);
    for (uint64_t at = mine.begin; at < mine.end; at += call.n * ring.room()) {
        const Range chunk{at, minimum(mine.end, at + call.n * ring.room())};
        const uint64_t bytes = round_up(divide_up(chunk.bytes(), call.n), PACK);
        const auto segment = [&](int r) { return chunk.part(r * bytes, (r + 1) * bytes); };
        if (!ring.reduce_scatter(segment, call.n > 1, ring.output + segment(call.me).begin)) return;
        if (!ring.all_gather(segment)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_reduce_scatter(Call& call, const Math& math) {
    const Blocks blocks{call.args.send_offsets, call.args.count, math.item};
    call.place = place_of(call.args.input_place);
    if (!call.start(blocks.digest(call.n))) return;
    if (call.together()) return symmetric_reduce_scatter(call, math, blocks);
    Ring<Math> ring(call, math);
    const Range mine = share(call.ctx, blocks.largest(call.n));
    for (uint64_t at = mine.begin; at < mine.end; at += ring.room()) {
        const uint64_t end = minimum(mine.end, at + ring.room());
        const auto segment = [&](int r) { return blocks[r].part(at, end); };
        if (!ring.reduce_scatter(segment, false, ring.output + at)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_all_gather(Call& call, const Math& math) {
    const Blocks blocks{call.args.recv_offsets, call.args.count, math.item};
    call.place = place_of(call.args.output_place);
    if (!call.start(blocks.digest(call.n))) return;
    if (call.together()) return symmetric_all_gather(call, blocks);
    Ring<Math> ring(call, math);
    const Range mine = share(call.ctx, blocks.largest(call.n));
    for (uint64_t at = mine.begin; at < mine.end; at += ring.room()) {
        const uint64_t end = minimum(mine.end, at + ring.room());
        const auto segment = [&](int r) { return blocks[r].part(at, end); };
        RC_ROLL for (int h = 0; h < HALVES; ++h) {
            const Range part = ring.half(segment(call.me), h);
            const byte* own = ring.input + (part.begin - blocks[call.me].begin);
            if (!ring.move(part, own, call.n > 1, ring.output + part.begin)) return;
        }
        if (!ring.all_gather(segment)) return;
    }
    call.end();
}

// Along the ring once, slot by slot: from the root to the one before it, or from the one after it to the root.
template <class Math>
RC_DEVICE void ring_broadcast(Call& call, const Math& math) {
    if (!call.start(call.args.count)) return;
    Ring<Math> ring(call, math);
    const bool first = call.me == call.args.root, last = ring.at(1) == call.args.root;
    const Range mine = share(call.ctx, call.args.count * math.item);
    for (uint64_t at = mine.begin; at < mine.end; at += ring.in.slot_bytes) {
        const Range part{at, minimum(mine.end, at + ring.in.slot_bytes)};
        const byte* own = first ? ring.input + at : nullptr;
        if (!ring.move(part, own, !last, ring.output + at)) return;
    }
    call.end();
}

template <class Math>
RC_DEVICE void ring_reduce(Call& call, const Math& math) {
    if (!call.start(call.args.count)) return;
    Ring<Math> ring(call, math);
    const bool first = ring.at(-1) == call.args.root, last = call.me == call.args.root;
    const Range mine = share(call.ctx, call.args.count * math.item);
    for (uint64_t at = mine.begin; at < mine.end; at += ring.in.slot_bytes) {
        const Range part{at, minimum(mine.end, at + ring.in.slot_bytes)};
        byte* keep = last ? ring.output + at : nullptr;
        if (!ring.add(part, !first, !last, keep)) return;
    }
    call.end();
}

}  // namespace ringcomm::cuda
