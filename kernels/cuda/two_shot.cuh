// all_reduce in two steps: rank j gets segment j of every rank, reduces it in rank order, and pushes the result to
// every peer. Each rank sends and receives 2 (n - 1) / n of the array. The result has the CPU's bits.
//
// Inputs are staged as in one_shot.cuh. Results go through slots: once all ranks have started the epoch, its slots are
// empty, and each is filled once.
#pragma once

#include "fifo.cuh"
#include "peers.cuh"
#include "ranges.cuh"

namespace ringcomm::cuda {

template <class Math>
RC_DEVICE bool two_shot_chunk(Call& call, const Math& math, Range chunk) {
    const Ctx& ctx = call.ctx;
    const byte* input = call.args.input;
    byte* output = call.args.output;
    const uint64_t each = round_up(divide_up(chunk.bytes(), call.n), PACK);
    const auto segment = [&](int r) { return chunk.part(r * each, (r + 1) * each); };
    const Range own = segment(call.me);

    for_each_peer(call, [&](const Ctx& part, int p) {
        copy(part, call.at(p).stage(call.epoch, call.me), input + segment(p).begin, segment(p).bytes());
    });
    call.signal_start(call.args.count);
    if (!call.await_start(call.args.count)) return false;
    const uint64_t stride = call.mine.layout.shape.stage_bytes;
    const Operands all{input + own.begin, call.me, call.mine.stage(call.epoch, 0), stride, call.n, true};
    reduce(ctx, math, all, Results{output + own.begin, nullptr, true}, own.bytes());

    block_sync(ctx);
    for_each_peer(call, [&](const Ctx& part, int p) {
        copy(part, SendFifo(call, ALL_PEERS, p).slot(), output + own.begin, own.bytes());
    });
    block_sync(ctx);
    bool ok = true;
    in_a_thread_each(call, [&](int p) { SendFifo(call, ALL_PEERS, p).post(); });
    in_a_thread_each(call, [&](int p) { ok = ok && RecvFifo(call, ALL_PEERS, p).wait_data(); });
    if (!block_all(ctx, ok)) return false;
    for_each_peer(call, [&](const Ctx& part, int p) {
        copy(part, output + segment(p).begin, RecvFifo(call, ALL_PEERS, p).slot(), segment(p).bytes());
    });
    return true;
}

template <class Math>
RC_DEVICE void two_shot(Call& call, const Math& math) {
    const Shape& shape = call.mine.layout.shape;
    const uint64_t slots = uint64_t(shape.slots) * call.mine.layout.peer_slot_bytes;
    const uint64_t chunk_bytes = call.n * minimum(shape.stage_bytes, slots);
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {
        const Range chunk{at, minimum(mine.end, at + chunk_bytes)};
        call.next_epoch();
        if (!two_shot_chunk(call, math, chunk)) return;
        at = chunk.end;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
