// Blocks from each rank to each other, every pair with a FIFO of its own: gather, scatter, all_gather and all_to_all.
//
// All ranks do the same in the same order: slot k to each peer that gets one, then slot k from each peer. A rank fills
// its slots of round k and releases those of earlier rounds before it waits for data of round k. So the ranks never
// wait in a circle, whatever the lengths.
#pragma once

#include "fifo.cuh"
#include "partition.cuh"
#include "symmetric.cuh"

namespace ringcomm::cuda {

// `sent(p)`: the range of the input that rank p gets; `received(p)`: the range of the output that rank p fills.
template <class Sent, class Received>
RC_DEVICE bool transfer(Call& call, Sent sent, Received received) {
    const uint64_t slot_bytes = call.mine.layout.peer_slot_bytes;
    const bool first = call.ctx.thread == 0;
    bool more = true;
    for (uint32_t k = 0; more; ++k) {
        more = false;
        for (int d = 1; d < call.n; ++d) {
            const int p = (call.me + d) % call.n;
            const Range part = sent(p).part(k * slot_bytes, (k + 1) * slot_bytes);
            if (!part.bytes()) continue;
            SendFifo send(call, ALL_PEERS, p);
            send.step = k;
            if (!block_all(call.ctx, !first || send.wait_slot())) return false;
            copy(call.ctx, send.slot(), call.args.input + part.begin, part.bytes());
            block_sync(call.ctx);
            if (first) send.post();
            more = true;
        }
        for (int d = 1; d < call.n; ++d) {
            const int p = (call.me - d + call.n) % call.n;
            const Range part = received(p).part(k * slot_bytes, (k + 1) * slot_bytes);
            if (!part.bytes()) continue;
            RecvFifo recv(call, ALL_PEERS, p);
            recv.step = k;
            if (!block_all(call.ctx, !first || recv.wait_data())) return false;
            copy(call.ctx, call.args.output + part.begin, recv.slot(), part.bytes());
            block_sync(call.ctx);
            if (first) recv.release();
            more = true;
        }
    }
    return true;
}

// `common`: what all ranks must agree on. The two ranks of a pair also compare their lengths, in both directions, so
// that both find a difference.
template <class Sent, class Received>
RC_DEVICE bool start_pairs(Call& call, uint64_t common, Sent sent, Received received) {
    const auto lengths = [&](int p) {
        const uint64_t to = sent(p).bytes(), from = received(p).bytes();
        return mix(mix(common, call.me < p ? to : from), call.me < p ? from : to);
    };
    call.next_epoch();
    call.signal_starts(lengths);
    return call.await_starts(lengths);
}

// This channel's part of every block; the own block is copied.
template <class Sent, class Received>
RC_DEVICE void exchange(Call& call, Sent sent, Received received) {
    const auto mine = [&](Range block) {
        const Range part = channel_part(call.ctx, block.bytes());
        return block.part(part.begin, part.end);
    };
    const Range from = mine(sent(call.me)), to = mine(received(call.me));
    copy(call.ctx, call.args.output + to.begin, call.args.input + from.begin, from.bytes());
    const auto out = [&](int p) { return mine(sent(p)); };
    const auto in = [&](int p) { return mine(received(p)); };
    if (transfer(call, out, in)) call.end();
}

template <class Sent, class Received>
RC_DEVICE void collective(Call& call, uint64_t common, Sent sent, Received received) {
    if (start_pairs(call, common, sent, received)) exchange(call, sent, received);
}

// gather, or scatter: a block of each rank, to the root or from it.
template <bool to_root, class Math>
RC_DEVICE void with_root(Call& call, const Math& math) {
    const RankBlocks blocks{to_root ? call.args.recv_offsets : call.args.send_offsets, call.args.count, math.item};
    const Range own{0, blocks[call.me].bytes()};
    const auto of_root = [&](int p) { return call.me == call.args.root ? blocks[p] : Range{}; };
    const auto of_rank = [&](int p) { return p == call.args.root ? own : Range{}; };
    if constexpr (to_root)
        collective(call, blocks.digest(call.n), of_rank, of_root);
    else
        collective(call, blocks.digest(call.n), of_root, of_rank);
}

template <class Math>
RC_DEVICE void all_gather(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.recv_offsets, call.args.count, math.item};
    const Range own{0, blocks[call.me].bytes()};
    collective(call, blocks.digest(call.n), [&](int) { return own; }, [&](int p) { return blocks[p]; });
}

template <class Math>
RC_DEVICE void all_to_all(Call& call, const Math& math) {
    const RankBlocks sent{call.args.send_offsets, call.args.count, math.item};
    const RankBlocks received{call.args.recv_offsets, call.args.count, math.item};
    const bool equal = !sent.offsets, in_place = call.args.input == call.args.output;
    const auto to = [&](int p) { return sent[p]; };
    const auto from = [&](int p) { return received[p]; };
    if (equal && !in_place) call.location = digest_of(call.args.input_location);
    if (!equal) call.agree_in_pairs();
    if (!start_pairs(call, equal ? sent.count : 0, to, from)) return;
    call.symmetric() ? symmetric_all_to_all(call, sent) : exchange(call, to, from);
}

}  // namespace ringcomm::cuda
