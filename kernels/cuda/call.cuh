// One call on one channel: its start, its waits, and how it is given up.
//
// Start. A rank writes its start word, the epoch and a fingerprint of what it calls (and beside it, before, a word of
// where its arrays lie: symmetric.cuh), into slot `epoch % 2` of every peer, by a store that publishes whatever it laid
// down before; then it reads the words of all peers, before it writes any output. A peer that starts epoch e + 1 has
// ended epoch e: so slots of two parities suffice, and what was pushed to a rank for epoch e may be overwritten by
// whoever has met it at a later one.
//
// Giving up. No wait outlasts the deadline or the host's abort. The first block of a rank that gives up tells the host
// in one record; all end, publish nothing more, and so do the kernels after this one.
#pragma once

#include "arena.cuh"

namespace ringcomm::cuda {

enum Reason : uint64_t {
    NO_REASON,
    NOT_STARTED,  // the peer has not started this call
    NO_DATA,      // … has not sent what it should have
    NO_ROOM,      // … has not taken what it was sent
    MISMATCH,     // … calls something else
    ABORTED,      // the host said so, while this peer was waited for
};

struct Record {
    uint64_t call, epoch, expected, got;
    int32_t peer, channel;
    uint64_t reason;
};

// In host memory that the device reaches.
struct Control {
    uint64_t abort;   // written by the host
    uint64_t failed;  // written by the device, last: `record` is complete
    Record record;
};

// Where an array lies in a symmetric buffer, which all ranks have mapped.
struct Place {
    byte* const* bases;  // device memory: of the buffer of each rank; null: the array lies in none
    uint64_t buffer, offset;

    RC_DEVICE byte* at(int rank) const { return bases[rank] + offset; }
};

// What is called; one form for all kernels. `kernel`, `dtype`, `op`, `root`, `factor`, the lengths and the number of
// blocks must be the same on all ranks, or they have a mismatch.
struct Args {
    Arena arena;
    Control* control;
    const byte* input;
    byte* output;
    Place input_place, output_place;
    const uint64_t* send_offsets;  // device memory, `ranks` + 1 elements, or null: equal blocks
    const uint64_t* recv_offsets;
    uint64_t call;  // the host's number of it, which a record repeats
    uint64_t timeout_ns;
    int32_t rank, kernel, dtype, op, root;
    int32_t dest, source;  // of a message; -1: none
    uint64_t count;        // elements of the array, or of one block, or of the message sent
    uint64_t recv_count;   // of the message received
    double factor;
};

constexpr uint64_t CLEANING = 1 << 30;    // every so many epochs the lines of LL are zeroed
constexpr uint32_t LINE_FLAG = 1u << 31;  // no flag of a line is zero

RC_DEVICE uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 32;
}

struct Call {
    const Ctx& ctx;
    const Args& args;
    const int n, me;
    const Channel mine;
    const uint64_t deadline;
    uint64_t epoch;
    Reason late = NOT_STARTED;  // what it means that a peer does not meet this rank
    bool met = false;           // before, in this call
    uint64_t place = 0;         // told to all peers: where this rank has its arrays (symmetric.cuh); 0: anywhere

    RC_DEVICE Call(const Ctx& ctx, const Args& args)
        : ctx(ctx),
          args(args),
          n(args.arena.layout.shape.ranks),
          me(args.rank),
          mine(args.arena.channel(ctx.block)),
          deadline(now_ns() + args.timeout_ns),
          epoch(*mine.epoch()) {}

    // ---- Start and end.

    RC_DEVICE bool usable() const { return !block_any(ctx, load_relaxed(args.arena.broken())); }

    // A new epoch. Lines of LL carry 31 bits of it: before those come again all lines have been zeroed, those of a
    // parity while the peers, who have not yet heard of this epoch, cannot write into them.
    RC_DEVICE void begin() {
        ++epoch;
        if (met) late = NO_DATA;
        met = true;
        if (epoch % CLEANING > 1) return;
        uint64_t* lines = mine.lines(epoch + 1, 0);
        const uint64_t count = uint64_t(n) * mine.layout.shape.line_bytes / 4;
        for (uint64_t i = ctx.thread; i < count; i += ctx.threads) store_relaxed(lines + i, uint64_t(0));
    }

    // `lengths(p)`: what must be the same here and at rank p, beside the rest of the call.
    template <class Lengths>
    RC_DEVICE void announce_each(Lengths lengths) const {
        block_sync(ctx);
        for (int p = ctx.thread; p < n; p += ctx.threads)
            if (p != me) say(COLLECTIVE, epoch, p, fingerprint(lengths(p)));
    }

    template <class Lengths>
    RC_DEVICE bool meet_each(Lengths lengths) const {
        bool met = true;
        for (int p = ctx.thread; p < n; p += ctx.threads)
            if (p != me) met = met && hear(COLLECTIVE, epoch, p, fingerprint(lengths(p)));
        return agreed(met);
    }

    // The same for all peers.
    RC_DEVICE void announce(uint64_t length) const {
        announce_each([&](int) { return length; });
    }
    RC_DEVICE bool meet(uint64_t length) const {
        return meet_each([&](int) { return length; });
    }

    // All of that, where nothing is laid down before.
    RC_DEVICE bool start(uint64_t length) {
        begin();
        announce(length);
        return meet(length);
    }

    RC_DEVICE void end() const {
        block_sync(ctx);
        if (ctx.thread == 0) *mine.epoch() = epoch;
    }

    RC_DEVICE bool agreed(bool well) const { return !block_any(ctx, !well); }

    RC_DEVICE Channel at(int peer) const { return args.arena.at(args.arena.peers()[peer], ctx.block); }

    RC_DEVICE void say(Lane lane, uint64_t number, int peer, uint32_t words) const {
        uint64_t* start = at(peer).start(lane, number, me);
        store_relaxed(start + 1, place);
        store_release<SITE_START>(start, number << 32 | words);
    }

    RC_DEVICE bool hear(Lane lane, uint64_t number, int peer, uint32_t words) const {
        const uint64_t* flag = mine.start(lane, number, peer);
        const uint64_t expected = number << 32 | words;
        uint64_t got;
        const auto started = [&](uint64_t word) { return (got = word) >> 32 == expected >> 32; };
        if (!wait(flag, late, peer, expected, started)) return false;
        if (got != expected) report(MISMATCH, peer, expected, got);
        return got == expected;
    }

    // Whether all ranks have told the same place. By the threads that have heard the peers.
    RC_DEVICE bool together() const {
        if (!place) return false;
        bool same = true;
        for (int p = ctx.thread; p < n; p += ctx.threads)
            if (p != me) same = same && load_relaxed(mine.start(COLLECTIVE, epoch, p) + 1) == place;
        return agreed(same);
    }

    RC_DEVICE uint32_t fingerprint(uint64_t length) const {
        uint64_t hash = mix(length, bits_as<uint64_t>(args.factor));
        hash = mix(hash, uint64_t(args.kernel) << 32 | uint32_t(args.root));
        hash = mix(hash, uint64_t(args.dtype) << 32 | uint32_t(args.op));
        return static_cast<uint32_t>(mix(hash, ctx.blocks));
    }

    // ---- Waiting, by single threads; the block then agrees.

    template <class Ready>
    RC_DEVICE bool wait(const uint64_t* flag, Reason reason, int peer, uint64_t expected, Ready ready) const {
        for (uint32_t spins = 0;; ++spins) {
            const uint64_t got = load_acquire(flag);
            if (ready(got)) return true;
            if (gives_up(spins, reason, peer, expected, got)) return false;
        }
    }

    // Between two looks. Clock and host are looked at now and then only: the host's memory is far.
    RC_DEVICE bool gives_up(uint32_t spins, Reason reason, int peer, uint64_t expected, uint64_t got) const {
        pause(spins);
        if (spins % 32 != 31) return false;
        if (load_relaxed(args.arena.broken())) return true;
        const bool aborted = load_relaxed(&args.control->abort);
        if (!aborted && now_ns() < deadline) return false;
        report(aborted ? ABORTED : reason, peer, expected, got);
        return true;
    }

    RC_DEVICE void report(Reason reason, int peer, uint64_t expected, uint64_t got) const {
        if (!claim(args.arena.broken())) return;
        args.control->record = {args.call, epoch, expected, got, peer, ctx.block, reason};
        store_release<SITE_END>(&args.control->failed, 1);  // to the host, so no site of its own
    }
};

}  // namespace ringcomm::cuda
