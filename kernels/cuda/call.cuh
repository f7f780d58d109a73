// One call on one channel: its start, its waits, and how it fails.
//
// Start. A rank writes its start flag, which holds the epoch and a fingerprint of the call, into slot `epoch % 2` of
// every peer, by a store that also publishes what the rank staged before; the word beside it holds the location of its
// arrays (symmetric.cuh). Then it reads the flags of all peers, before it writes any output. A peer that starts epoch
// e + 1 has ended epoch e. So slots of two parities suffice, and a rank may overwrite what it pushed to a peer for
// epoch e once it has seen that peer start a later one.
//
// Failure. No wait outlasts the deadline or the host's abort. The first block of a rank that fails reports it to the
// host in one KernelFailure; all blocks end without publishing anything more, and so do the kernels after this one.
#pragma once

#include "arena.cuh"

namespace ringcomm::cuda {

// In flight on a communicator, and as many of its messages: a host thread that waits for the driver's queue can do
// nothing else.
constexpr uint64_t MAX_LAUNCHES = 256;

enum Reason : uint64_t {
#define REASON_ROW(name, NAME) NAME,
#include "ringcomm/types.def"
};

struct KernelFailure {
    uint64_t call, epoch, expected, got;
    int32_t peer, channel;
    uint64_t reason;
};

// In host memory that the device accesses.
struct Control {
    uint64_t abort;   // written by the host
    uint64_t failed;  // written by the device, last: `failure` is complete
    KernelFailure failure;
    // Written by the device. A call whose number has the bit CAPTURED may run again at any time, as part of a graph: it
    // says with its epoch that it has started, and that it has ended.
    uint64_t completed;  // the number of the last call that all blocks of this rank have ended, also by a failure
    uint64_t replay_started, replay_ended;
};

constexpr uint64_t CAPTURED = 1ull << 63;

// The location of an array in a symmetric buffer, which all ranks have mapped.
struct Location {
    byte* const* bases;  // device memory: the buffer of each rank; null: the array is in no symmetric buffer
    uint64_t buffer, offset;
    byte* multicast;  // the buffers of all ranks at once (nvls.cuh); null: there is no such address

    RC_DEVICE byte* at(int rank) const { return bases[rank] + offset; }
};

// RMSNorm after an all_reduce, in the same launch (rms_norm.cuh). Device memory; `output` null: none.
struct RmsNorm {
    const byte* residual;
    const byte* weight;
    byte* output;
    uint64_t width;  // elements of a row
    float epsilon;
};

// The arguments of every kernel. `kernel`, `dtype`, `op`, `root`, `factor`, the lengths and the number of blocks must
// be the same on all ranks, else the call is a mismatch.
struct Args {
    DeviceArena arena;
    Control* control;
    const byte* input;
    byte* output;
    Location input_location, output_location;
    const uint64_t* send_offsets;  // device memory, `ranks` + 1 elements, or null: equal blocks
    const uint64_t* recv_offsets;
    uint64_t call;  // the host's number of this call, repeated in a KernelFailure
    uint64_t timeout_ns;
    int32_t rank, kernel, dtype, op, root;
    uint64_t count;  // elements of the array, or of one block
    double factor;
    RmsNorm norm;
};

constexpr uint64_t LL_CLEAN_PERIOD = 1 << 30;  // epochs after which the lines of LL are zeroed
constexpr uint32_t LINE_FLAG = 1u << 31;       // set in the flag of every line, so that none is zero

RC_DEVICE uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 32;
}

struct Call {
    const Ctx& ctx;
    const Args& args;
    const int n, me;
    const Channel mine;
    const uint64_t deadline, first_epoch;
    uint64_t epoch;
    uint64_t location = 0;  // sent to all peers: a digest of the location of this rank's arrays; 0: not symmetric
    bool pairwise = false;  // the lengths are known to pairs of ranks only; `location` is then a digest of all else

    RC_DEVICE Call(const Ctx& ctx, const Args& args)
        : ctx(ctx),
          args(args),
          n(args.arena.layout.shape.ranks),
          me(args.rank),
          mine(args.arena.channel(ctx.block)),
          deadline(now_ns() + args.timeout_ns),
          first_epoch(*mine.epoch() + 1),
          epoch(first_epoch - 1) {}

    // ---- Start and end.

    RC_DEVICE bool usable() const { return !block_any(ctx, load_relaxed(args.arena.broken())); }

    // The lines of LL carry 31 bits of the epoch. Before those repeat all lines have been zeroed, those of one parity
    // while the peers, which have not yet seen this epoch, cannot write to them.
    RC_DEVICE void next_epoch() {
        ++epoch;
        if (epoch % LL_CLEAN_PERIOD > 1) return;
        uint64_t* lines = mine.lines(epoch + 1, 0);
        const uint64_t count = uint64_t(n) * mine.layout.shape.line_bytes / 4;
        for (uint64_t i = ctx.thread; i < count; i += ctx.threads) store_relaxed(lines + i, uint64_t(0));
    }

    // `lengths(p)`: the part of the fingerprint that only this rank and rank p must agree on.
    template <class Lengths>
    RC_DEVICE void signal_starts(Lengths lengths) const {
        block_sync(ctx);
        for (int p = ctx.thread; p < n; p += ctx.threads) {
            if (p == me) continue;
            uint64_t* flag = at(p).start(epoch, me);
            store_relaxed(flag + 1, location);
            store_release<SITE_START>(flag, epoch << 32 | fingerprint(lengths(p)));
        }
    }

    template <class Lengths>
    RC_DEVICE bool await_starts(Lengths lengths) const {
        bool ok = true;
        for (int p = ctx.thread; p < n; p += ctx.threads)
            if (p != me) ok = ok && await_start(p, epoch << 32 | fingerprint(lengths(p)));
        return block_all(ctx, ok);
    }

    // The same length for all peers.
    RC_DEVICE void signal_start(uint64_t length) const {
        signal_starts([&](int) { return length; });
    }
    RC_DEVICE bool await_start(uint64_t length) const {
        return await_starts([&](int) { return length; });
    }

    // All of these, where nothing is staged before the start.
    RC_DEVICE bool start(uint64_t length) {
        next_epoch();
        signal_start(length);
        return await_start(length);
    }

    RC_DEVICE void end() const {
        block_sync(ctx);
        if (ctx.thread == 0) *mine.epoch() = epoch;
    }

    // ---- What the host sees of the call: every kernel begins and ends with these, however it ends.

    RC_DEVICE void report_start() const {
        if (replays()) store_relaxed(&args.control->replay_started, first_epoch);
    }

    // Orders all that the call has written before it, also for the host, which may read host memory then.
    RC_DEVICE void report_end() const {
        block_sync(ctx);
        if (replays()) return store_relaxed(&args.control->replay_ended, first_epoch);
        if (ctx.thread || args.call & CAPTURED || !last_of(args.arena.ended(), ctx.blocks)) return;
        store_release<SITE_END>(&args.control->completed, args.call);
    }

    RC_DEVICE bool replays() const { return args.call & CAPTURED && ctx.block == 0 && ctx.thread == 0; }

    RC_DEVICE Channel at(int peer) const { return args.arena.at(args.arena.peers()[peer], ctx.block); }

    RC_DEVICE bool await_start(int peer, uint64_t expected) const {
        uint64_t got;
        const auto started = [&](uint64_t word) { return (got = word) >> 32 == expected >> 32; };
        const Reason reason = epoch == first_epoch ? NOT_STARTED : NO_DATA;
        if (!wait(mine.start(epoch, peer), reason, peer, expected, started)) return false;
        if (got != expected) report(same_but_lengths(peer) ? COUNTS : MISMATCH, peer, expected, got);
        return got == expected;
    }

    RC_DEVICE void agree_in_pairs() {
        pairwise = true;
        location = fingerprint(0) | uint64_t(1) << 32;  // not 0
    }
    RC_DEVICE bool same_but_lengths(int peer) const {
        return pairwise && load_relaxed(mine.start(epoch, peer) + 1) == location;
    }

    // Whether all ranks have sent the same location. Each thread reads the words beside the flags it has waited for.
    RC_DEVICE bool symmetric() const {
        if (!location || pairwise) return false;
        bool same = true;
        for (int p = ctx.thread; p < n; p += ctx.threads)
            if (p != me) same = same && load_relaxed(mine.start(epoch, p) + 1) == location;
        return block_all(ctx, same);
    }

    RC_DEVICE uint32_t fingerprint(uint64_t length) const {
        uint64_t hash = mix(length, bits_as<uint64_t>(args.factor));
        hash = mix(hash, uint64_t(args.kernel) << 32 | uint32_t(args.root));
        hash = mix(hash, uint64_t(args.dtype) << 32 | uint32_t(args.op));
        return static_cast<uint32_t>(mix(hash, ctx.blocks));
    }

    // ---- Waits, by single threads; block_all then makes their result that of the block.

    // Each acquiring load empties the L1 cache of the multiprocessor: so those that poll are relaxed, but for the last.
    // That one is ready too: a peer writes the flag of a later call or step only once this rank has gone on.
    template <class Ready>
    RC_DEVICE bool wait(const uint64_t* flag, Reason reason, int peer, uint64_t expected, Ready ready) const {
        uint64_t got;
        for (uint32_t spins = 0; !ready(got = load_relaxed(flag)); ++spins)
            if (must_fail(spins, reason, peer, expected, got)) return false;
        return ready(load_acquire(flag));
    }

    // Between two loads of a flag. Clock and abort flag are read every 32 times: the host's memory is far.
    RC_DEVICE bool must_fail(uint32_t spins, Reason reason, int peer, uint64_t expected, uint64_t got) const {
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
        args.control->failure = {args.call, epoch, expected, got, peer, ctx.block, reason};
        store_release<SITE_END>(&args.control->failed, 1);  // to the host, so no site of its own
    }
};

}  // namespace ringcomm::cuda
