// all_reduce of very little: each 4 bytes travel with their flag in one store of 8 bytes (a line), so nothing has to be
// ordered and nothing is waited for twice. Every rank adds up everything, in rank order: the bits of one_shot.cuh.
//
// The flag is the epoch, in 31 bits and one that says it is a flag. Lines of two parities, as the staging of one_shot:
// whoever pushes for epoch e + 2 has heard of e + 1. Call::begin zeroes them long before an epoch's flag comes again.
#pragma once

#include "blocks.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

constexpr int WORDS = PACK / 4;

RC_DEVICE uint32_t line_flag(const Call& call) { return LINE_FLAG | static_cast<uint32_t>(call.epoch); }

RC_DEVICE void push_lines(const Call& call, int peer, uint64_t pack, const Pack& data) {
    uint64_t* lines = call.at(peer).lines(call.epoch, call.me) + pack * WORDS;
    RC_UNROLL for (int w = 0; w < WORDS; ++w) store_relaxed(lines + w, uint64_t(line_flag(call)) << 32 | data.word[w]);
}

RC_DEVICE bool take_lines(const Call& call, int peer, uint64_t pack, Pack& data) {
    const uint64_t* lines = call.mine.lines(call.epoch, peer) + pack * WORDS;
    RC_UNROLL for (int w = 0; w < WORDS; ++w) {
        uint64_t got = load_relaxed(lines + w);
        for (uint32_t spins = 0; got >> 32 != line_flag(call); got = load_relaxed(lines + w))
            if (call.gives_up(spins++, NO_DATA, peer, line_flag(call), got >> 32)) return false;
        data.word[w] = static_cast<uint32_t>(got);
    }
    return true;
}

template <class Math>
RC_DEVICE bool add_lines(const Call& call, const Math& math, const byte* input, byte* output, uint64_t bytes) {
    for (uint64_t i = call.ctx.thread; i * PACK < bytes; i += call.ctx.threads) {
        const Anywhere access{minimum(PACK, bytes - i * PACK)};
        Pack data{};
        const auto take = [&](int p) {
            if (p != call.me) return take_lines(call, p, i, data);
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
    const Range mine = share(call.ctx, call.args.count * math.item);
    uint64_t at = mine.begin;
    do {
        const uint64_t bytes = minimum(call.mine.layout.shape.line_bytes, mine.end - at);
        const byte* input = call.args.input + at;
        call.begin();
        call.announce(call.args.count);  // before the lines, for its store waits for whatever was stored before it
        for (uint64_t i = call.ctx.thread; i * PACK < bytes; i += call.ctx.threads) {
            const Pack data = Anywhere{minimum(PACK, bytes - i * PACK)}.load(input + i * PACK);
            for (int d = 1; d < call.n; ++d) push_lines(call, (call.me + d) % call.n, i, data);
        }
        if (!call.meet(call.args.count)) return;
        if (!call.agreed(add_lines(call, math, input, call.args.output + at, bytes))) return;
        at += bytes;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
