// Blocks from each rank to each other: broadcast, gather, scatter, all_gather and all_to_all.
//
// The beginning of every block is pushed into a staging buffer of its receiver before the start flag, which publishes
// it: a small block needs nothing else. (In symmetric buffers a long one is then moved directly, all of it: what was
// pushed is a small part.) The rest goes through a FIFO for each pair, all of them side by side: in round
// k a rank fills slot k of each peer, once it has been released, and takes out slot k - LAG of each. So it waits only
// for what its peers do in earlier rounds, and the ranks never wait in a circle, whatever the lengths.
#pragma once

#include "fifo.cuh"
#include "peers.cuh"
#include "ranges.cuh"
#include "symmetric.cuh"

namespace ringcomm::cuda {

constexpr uint32_t LAG = 2;  // less than the slots; meanwhile the flags of two rounds are in flight

// `sent(p)`: the range of the input that rank p gets; `received(p)`: the range of the output that rank p fills.
template <class Sent, class Received>
RC_DEVICE bool transfer(Call& call, Sent sent, Received received) {
    const uint64_t slot_bytes = call.mine.layout.peer_slot_bytes;
    uint64_t longest = 0;
    for (int p = 0; p < call.n; ++p) {
        const uint64_t to = sent(p).bytes(), from = received(p).bytes(), both = to > from ? to : from;
        if (p != call.me && both > longest) longest = both;
    }
    if (!longest) return true;
    const uint64_t rounds = divide_up(longest, slot_bytes) + LAG;
    RC_NO_UNROLL for (uint32_t k = 0; k < rounds; ++k) {
        const auto out = [&](int p) { return sent(p).part(k * slot_bytes, (k + 1) * slot_bytes); };
        const auto in = [&](int p) {
            return k < LAG ? Range{} : received(p).part((k - LAG) * slot_bytes, (k - LAG + 1) * slot_bytes);
        };
        bool ok = true;
        in_a_thread_each(call, [&](int p) {
            if (out(p).bytes()) ok = ok && SendFifo(call, ALL_PEERS, p, k).wait_slot();
            if (in(p).bytes()) ok = ok && RecvFifo(call, ALL_PEERS, p, k - LAG).wait_data();
        });
        if (!block_all(call.ctx, ok)) return false;
        for_each_peer(call, [&](const Ctx& ctx, int p) {
            const Range to = out(p), from = in(p);
            copy(ctx, SendFifo(call, ALL_PEERS, p, k).slot(), call.args.input + to.begin, to.bytes());
            copy(ctx, call.args.output + from.begin, RecvFifo(call, ALL_PEERS, p, k - LAG).slot(), from.bytes());
        });
        block_sync(call.ctx);
        in_a_thread_each(call, [&](int p) {
            if (out(p).bytes()) SendFifo(call, ALL_PEERS, p, k).post();
            if (in(p).bytes()) RecvFifo(call, ALL_PEERS, p, k - LAG).release();
        });
    }
    return true;
}

// Starts a call and moves the beginning of each block with it. `common`: what all ranks must agree on. The two ranks of
// a pair also compare their lengths, in both directions, so that both find a difference. `part(range)`: what of it is
// staged.
template <class Sent, class Received, class Part>
RC_DEVICE bool start_with_data(Call& call, uint64_t common, Sent sent, Received received, Part part) {
    const auto lengths = [&](int p) {
        const uint64_t to = sent(p).bytes(), from = received(p).bytes();
        return mix(mix(common, call.me < p ? to : from), call.me < p ? from : to);
    };
    call.next_epoch();
    for_each_peer(call, [&](const Ctx& ctx, int p) {
        const Range out = part(sent(p));
        copy(ctx, call.at(p).stage(call.epoch, call.me), call.args.input + out.begin, out.bytes());
    });
    call.signal_starts(lengths);
    if (!call.await_starts(lengths)) return false;
    for_each_peer(call, [&](const Ctx& ctx, int p) {
        const Range in = part(received(p));
        copy(ctx, call.args.output + in.begin, call.mine.stage(call.epoch, p), in.bytes());
    });
    return true;
}

// Moves this channel's part of every block, and copies that of the own block. `directly()`: moves all of it, if it can,
// where blocks of equal length have more than is staged.
template <class Sent, class Received, class Directly>
RC_DEVICE void collective(Call& call, uint64_t common, Sent sent, Received received, Directly directly) {
    // Where only pairs know their lengths, a rank that finds a difference is to send nothing, so that all ranks fail.
    const uint64_t stage = call.pairwise ? 0 : call.mine.layout.shape.stage_bytes;
    const auto mine = [&](Range block) {
        const Range part = channel_part(call.ctx, block.bytes());
        return block.part(part.begin, part.end);
    };
    if (!start_with_data(call, common, sent, received, [&](Range block) { return mine(block).part(0, stage); })) return;
    if (mine(sent(call.me)).bytes() > stage && directly()) return;
    const Range from = mine(sent(call.me)), to = mine(received(call.me));
    copy(call.ctx, call.args.output + to.begin, call.args.input + from.begin, from.bytes());
    const auto rest = [&](Range block) { return mine(block).part(stage, block.bytes()); };
    if (transfer(call, [&](int p) { return rest(sent(p)); }, [&](int p) { return rest(received(p)); })) call.end();
}

template <class Sent, class Received>
RC_DEVICE void collective(Call& call, uint64_t common, Sent sent, Received received) {
    collective(call, common, sent, received, [] { return false; });
}

// From the root to each rank, or to it: `block(p)` of the root's array.
template <bool to_root, class Block>
RC_DEVICE void with_root(Call& call, uint64_t common, Block block) {
    const int root = call.args.root;
    const Range own{0, block(call.me).bytes()};
    const auto of_root = [&](int p) { return call.me == root ? block(p) : Range{}; };
    const auto of_rank = [&](int p) { return p == root ? own : Range{}; };
    if constexpr (to_root)
        collective(call, common, of_rank, of_root);
    else
        collective(call, common, of_root, of_rank);
}

template <class Math>
RC_DEVICE void broadcast(Call& call, const Math& math) {
    const Range all{0, call.args.count * math.item};
    with_root<false>(call, call.args.count, [&](int) { return all; });
}

template <class Math>
RC_DEVICE void scatter(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.send_offsets, call.args.count, math.item};
    with_root<false>(call, blocks.digest(call.n), [&](int p) { return blocks[p]; });
}

template <class Math>
RC_DEVICE void gather(Call& call, const Math& math) {
    const RankBlocks blocks{call.args.recv_offsets, call.args.count, math.item};
    with_root<true>(call, blocks.digest(call.n), [&](int p) { return blocks[p]; });
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
    collective(call, equal ? sent.count : 0, to, from, [&] {
        if (!call.symmetric()) return false;
        symmetric_all_to_all(call, sent);
        return true;
    });
}

}  // namespace ringcomm::cuda
