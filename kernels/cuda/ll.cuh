// The LL (low-latency) protocol, all_reduce of a few bytes: each 4 bytes travel with their flag in one store of 8 bytes
// (a line), so no store is ordered after another and no wait is repeated. Every rank reduces all inputs in rank order:
// the bits of one_shot.cuh.
//
// The flag is 31 bits of the epoch and LINE_FLAG. Lines have two parities, as the staging buffers of one_shot:
// a rank that pushes for epoch e + 2 has seen this one start e + 1. Call::next_epoch zeroes them long before a flag
// repeats.
#pragma once

#include "peers.cuh"
#include "ranges.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

// The lines of a pack: two words each for two accesses of 16 bytes. Every word has its flag, so that the words of an
// access need not arrive together.
struct PackLines {
    uint64_t word[4];

    RC_DEVICE void load(const uint64_t* at) {
        load_pair(at, word[0], word[1]);
        load_pair(at + 2, word[2], word[3]);
    }
    RC_DEVICE void store(uint64_t* at) const {
        store_pair(at, word[0], word[1]);
        store_pair(at + 2, word[2], word[3]);
    }
    // The flag of a line that has not come yet, else `flag`.
    RC_DEVICE uint32_t arrived(uint32_t flag) const {
        uint32_t got = flag;
        RC_UNROLL for (const uint64_t each : word) got = each >> 32 == flag ? got : static_cast<uint32_t>(each >> 32);
        return got;
    }
};
constexpr uint64_t PACK_WORDS = sizeof(PackLines) / sizeof(uint64_t);

RC_DEVICE uint32_t line_flag(const Call& call) { return LINE_FLAG | static_cast<uint32_t>(call.epoch); }

RC_DEVICE void push_lines(const Call& call, const byte* input, uint64_t bytes) {
    const uint64_t flag = uint64_t(line_flag(call)) << 32;
    for_each_peer(call, [&](const Ctx& part, int p) {
        uint64_t* lines = call.at(p).lines(call.epoch, call.me);
        for (uint64_t i = part.thread; i * PACK < bytes; i += part.threads) {
            const Pack data = Unaligned{minimum(PACK, bytes - i * PACK)}.load(input + i * PACK);
            PackLines{flag | data.word[0], flag | data.word[1], flag | data.word[2], flag | data.word[3]}.store(
                lines + i * PACK_WORDS);
        }
    });
}

// The lines of so many ranks are loaded before the first is looked at; more would take the registers of wide sums.
template <class Math>
constexpr int IN_FLIGHT = Math::tile > 2 ? 8 : 4;

template <class Math>
RC_DEVICE bool reduce_lines(const Call& call, const Math& math, const byte* input, byte* output, uint64_t bytes) {
    constexpr int GROUP = IN_FLIGHT<Math>;
    const uint32_t flag = line_flag(call);
    for (uint64_t i = call.ctx.thread; i * PACK < bytes; i += call.ctx.threads) {
        const Unaligned access{minimum(PACK, bytes - i * PACK)};
        const auto lines = [&](int p) { return call.mine.lines(call.epoch, p) + i * PACK_WORDS; };
        typename Math::Wide acc;
        RC_NO_UNROLL for (int first = 0; first < call.n; first += GROUP) {
            PackLines got[GROUP];
            RC_UNROLL for (int g = 0; g < GROUP; ++g) {
                if (first + g < call.n && first + g != call.me) got[g].load(lines(first + g));
            }
            RC_UNROLL for (int g = 0; g < GROUP; ++g) {
                const int p = first + g;
                if (p >= call.n) break;
                Pack data{};
                if (p == call.me) {
                    data = access.load(input + i * PACK);
                } else {
                    for (uint32_t spins = 0; got[g].arrived(flag) != flag; got[g].load(lines(p)))
                        if (call.must_fail(spins++, NO_DATA, p, flag, got[g].arrived(flag))) return false;
                    RC_UNROLL for (int w = 0; w < 4; ++w) data.word[w] = static_cast<uint32_t>(got[g].word[w]);
                }
                if (p == 0)
                    acc = math.input(data);
                else
                    math.combine(acc, math.input(data));
            }
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
        push_lines(call, input, bytes);
        if (!call.await_start(call.args.count)) return;
        if (!block_all(call.ctx, reduce_lines(call, math, input, call.args.output + at, bytes))) return;
        at += bytes;
    } while (at < mine.end);
    call.end();
}

}  // namespace ringcomm::cuda
