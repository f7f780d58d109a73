// The LL (low-latency) protocol, all_reduce of a few bytes: each 4 bytes travel with their flag in one store of 8 bytes
// (a line), so no store is ordered after another and no wait is repeated. Every rank reduces all inputs in rank order:
// the bits of one_shot.cuh.
//
// The flag is 31 bits of the epoch and LINE_FLAG. Lines have two parities, as the staging buffers of one_shot:
// a rank that pushes for epoch e + 2 has seen this one start e + 1. Call::next_epoch zeroes them long before a flag
// repeats.
#pragma once

#include "partition.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

constexpr int WORDS = PACK / 4;

RC_DEVICE uint32_t line_flag(const Call& call) { return LINE_FLAG | static_cast<uint32_t>(call.epoch); }

RC_DEVICE void push_lines(const Call& call, int peer, uint64_t pack, const Pack& data) {
    uint64_t* lines = call.at(peer).lines(call.epoch, call.me) + pack * WORDS;
    RC_UNROLL for (int w = 0; w < WORDS; ++w) store_relaxed(lines + w, uint64_t(line_flag(call)) << 32 | data.word[w]);
}

RC_DEVICE bool wait_lines(const Call& call, int peer, uint64_t pack, Pack& data) {
    const uint64_t* lines = call.mine.lines(call.epoch, peer) + pack * WORDS;
    RC_UNROLL for (int w = 0; w < WORDS; ++w) {
        uint64_t got = load_relaxed(lines + w);
        for (uint32_t spins = 0; got >> 32 != line_flag(call); got = load_relaxed(lines + w))
            if (call.must_fail(spins++, NO_DATA, peer, line_flag(call), got >> 32)) return false;
        data.word[w] = static_cast<uint32_t>(got);
    }
    return true;
}

template <class Math>
RC_DEVICE bool reduce_lines(const Call& call, const Math& math, const byte* input, byte* output, uint64_t bytes) {
    for (uint64_t i = call.ctx.thread; i * PACK < bytes; i += call.ctx.threads) {
        const Unaligned access{minimum(PACK, bytes - i * PACK)};
        Pack data{};
        const auto take = [&](int p) {
            if (p != call.me) return wait_lines(call, p, i, data);
            data = access.load(input + i * PACK);
            return true;
        };
        if (!take(0)) return false;
        typename Math::Wide acc = math.input(data);
        for (int p = 1; p < call.n; ++p) {
            if (!take(p)) return false;
            math.combine(acc, math.input(data));
        }
        access.store(output + i * PACK, math.output(acc));
    }
    return true;
}

template <class Math>
RC_DEVICE void ll(Call& call, const Math& math) {
    const Range mine = channel_part(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {
        const uint64_t bytes = minimum(call.mine.layout.shape.line_bytes, mine.end - at);
        const byte* input = call.args.input + at;
        call.next_epoch();
        call.signal_start(call.args.count);  // before the lines: a releasing store waits for all stores before it
        for (uint64_t i = call.ctx.thread; i * PACK < bytes; i += call.ctx.threads) {
            const Pack data = Unaligned{minimum(PACK, bytes - i * PACK)}.load(input + i * PACK);
            for (int d = 1; d < call.n; ++d) push_lines(call, (call.me + d) % call.n, i, data);
        }
        if (!call.await_start(call.args.count)) return;
        if (!block_all(call.ctx, reduce_lines(call, math, input, call.args.output + at, bytes))) return;
        at += bytes;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
