// Blocks from anybody to anybody, each by a pipe of its own: gather, scatter, all_gather, all_to_all, and messages.
//
// All ranks do the same in the same order: slot k to each peer that gets one, then slot k from each peer. Room for slot
// k comes from a peer's round k - slots, and slot k from its round k, before it waits for anything of that round itself
// but room: so nobody waits in a circle, whatever the lengths.
#pragma once

#include "blocks.cuh"
#include "pipe.cuh"
#include "symmetric.cuh"

namespace ringcomm::cuda {

// `sent(p)`, `received(p)`: where what rank p gets lies in the input, what it gives in the output; `to(p)`, `from(p)`:
// the number of the call, as the two count it.
template <class Sent, class Received, class ToNumber, class FromNumber>
RC_DEVICE bool transfer(Call& call, Traffic traffic, Sent sent, Received received, ToNumber to, FromNumber from) {
    const uint64_t room = call.mine.layout.pair_bytes;
    const bool first = call.ctx.thread == 0;
    bool more = true;
    for (uint32_t k = 0; more; ++k) {
        more = false;
        for (int d = 1; d < call.n; ++d) {
            const int p = (call.me + d) % call.n;
            const Range part = sent(p).part(k * room, (k + 1) * room);
            if (!part.bytes()) continue;
            Outlet out(call, SHARED, p, to(p), traffic);
            out.step = k;
            if (!call.agreed(!first || out.room())) return false;
            copy(call.ctx, out.slot(), call.args.input + part.begin, part.bytes());
            block_sync(call.ctx);
            if (first) out.filled();
            more = true;
        }
        for (int d = 1; d < call.n; ++d) {
            const int p = (call.me - d + call.n) % call.n;
            const Range part = received(p).part(k * room, (k + 1) * room);
            if (!part.bytes()) continue;
            Inlet in(call, SHARED, p, from(p), traffic);
            in.step = k;
            if (!call.agreed(!first || in.arrived())) return false;
            copy(call.ctx, call.args.output + part.begin, in.slot(), part.bytes());
            block_sync(call.ctx);
            if (first) in.took();
            more = true;
        }
    }
    return true;
}

// `common`: what all ranks must agree on, beside the lengths that two of them do: those of both directions, so that
// both know it when they differ.
template <class Sent, class Received>
RC_DEVICE bool meet_pairs(Call& call, uint64_t common, Sent sent, Received received) {
    const auto lengths = [&](int p) {
        const uint64_t to = sent(p).bytes(), from = received(p).bytes();
        return mix(mix(common, call.me < p ? to : from), call.me < p ? from : to);
    };
    call.begin();
    call.announce_each(lengths);
    return call.meet_each(lengths);
}

// This channel's share of every block; what stays here is copied.
template <class Sent, class Received>
RC_DEVICE void exchange(Call& call, Sent sent, Received received) {
    const auto mine = [&](Range block) {
        const Range part = share(call.ctx, block.bytes());
        return block.part(part.begin, part.end);
    };
    const auto number = [&](int) { return call.epoch; };
    const Range own = mine(sent(call.me)), home = mine(received(call.me));
    copy(call.ctx, call.args.output + home.begin, call.args.input + own.begin, own.bytes());
    const auto out = [&](int p) { return mine(sent(p)); };
    const auto in = [&](int p) { return mine(received(p)); };
    if (transfer(call, BETWEEN_ALL, out, in, number, number)) call.end();
}

template <class Sent, class Received>
RC_DEVICE void collective(Call& call, uint64_t common, Sent sent, Received received) {
    if (meet_pairs(call, common, sent, received)) exchange(call, sent, received);
}

RC_DEVICE constexpr Range nothing() { return {0, 0}; }

template <class Math>
RC_DEVICE void gather(Call& call, const Math& math) {
    const Blocks blocks{call.args.recv_offsets, call.args.count, math.item};
    const bool root = call.me == call.args.root;
    const Range own{0, blocks[call.me].bytes()};
    collective(
        call, blocks.digest(call.n), [&](int p) { return p == call.args.root ? own : nothing(); },
        [&](int p) { return root ? blocks[p] : nothing(); });
}

template <class Math>
RC_DEVICE void scatter(Call& call, const Math& math) {
    const Blocks blocks{call.args.send_offsets, call.args.count, math.item};
    const bool root = call.me == call.args.root;
    const Range own{0, blocks[call.me].bytes()};
    collective(
        call, blocks.digest(call.n), [&](int p) { return root ? blocks[p] : nothing(); },
        [&](int p) { return p == call.args.root ? own : nothing(); });
}

template <class Math>
RC_DEVICE void all_gather(Call& call, const Math& math) {
    const Blocks blocks{call.args.recv_offsets, call.args.count, math.item};
    const Range own{0, blocks[call.me].bytes()};
    collective(call, blocks.digest(call.n), [&](int) { return own; }, [&](int p) { return blocks[p]; });
}

template <class Math>
RC_DEVICE void all_to_all(Call& call, const Math& math) {
    const Blocks sent{call.args.send_offsets, call.args.count, math.item};
    const Blocks received{call.args.recv_offsets, call.args.count, math.item};
    const bool equal = !sent.offsets, in_place = call.args.input == call.args.output;
    const auto to = [&](int p) { return sent[p]; };
    const auto from = [&](int p) { return received[p]; };
    if (equal && !in_place) call.place = place_of(call.args.input_place);
    if (!meet_pairs(call, equal ? sent.count : 0, to, from)) return;
    call.together() ? symmetric_all_to_all(call, sent) : exchange(call, to, from);
}

// A message to `dest` and one from `source`, either of which may be missing. Messages of a pair have numbers of their
// own: other ranks take no part. The one who receives grants its slots, which until then may be part of a collective.
template <class Math>
RC_DEVICE void message(Call& call, const Math& math) {
    const int dest = call.args.dest, source = call.args.source;
    const uint64_t sent = dest < 0 ? 0 : *call.mine.sent(dest) + 1;
    const uint64_t received = source < 0 ? 0 : *call.mine.received(source) + 1;
    const uint64_t to_bytes = call.args.count * math.item, from_bytes = call.args.recv_count * math.item;
    bool well = true;
    block_sync(call.ctx);
    if (call.ctx.thread == 0) {
        if (dest >= 0) call.say(OFFER, sent, dest, call.fingerprint(to_bytes));
        if (source >= 0) call.say(GRANT, received, source, call.fingerprint(from_bytes));
        if (dest >= 0) well = call.hear(GRANT, sent, dest, call.fingerprint(to_bytes));
        if (source >= 0) well = well && call.hear(OFFER, received, source, call.fingerprint(from_bytes));
    }
    if (!call.agreed(well)) return;
    const auto out = [&](int p) { return p == dest ? share(call.ctx, to_bytes) : nothing(); };
    const auto in = [&](int p) { return p == source ? share(call.ctx, from_bytes) : nothing(); };
    if (!transfer(call, BETWEEN_TWO, out, in, [&](int) { return sent; }, [&](int) { return received; })) return;
    block_sync(call.ctx);
    if (call.ctx.thread == 0 && dest >= 0) *call.mine.sent(dest) = sent;
    if (call.ctx.thread == 0 && source >= 0) *call.mine.received(source) = received;
}

}  // namespace ringcomm::cuda
