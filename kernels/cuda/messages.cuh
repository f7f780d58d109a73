// Point-to-point messages. A launch moves any number of them, to and from any peers: a batch.
//
// STAGE copies a message into a slot of the sender's arena, and FETCH from there to where the receiver wants it, piece
// by piece as they appear. The hosts match messages. They launch FETCH once STAGE has been launched, and STAGE into a
// used slot once the FETCH of the last message in it has been launched: so a kernel waits only for kernels launched
// before it, and among messages no order, stream or rank makes them wait in a circle (docs/gpu.md has messages beside
// collectives).
//
// A block of the grid is a channel. A message has one part for each channel, or for fewer if it is short; a part moves
// in pieces. A block moves whatever is ready of all messages of the launch, so none waits for another. Each thread
// looks after the flags of its own messages.
//
// A receiver compares the fingerprint of the message before its data, and writes nothing if that differs.
#pragma once

#include "message_arena.cuh"
#include "ranges.cuh"
#include "reduce.cuh"

namespace ringcomm::cuda {

enum MessageKind : int32_t { STAGE, FETCH, MESSAGE_KINDS };

struct MessageTransfer {
    byte* data;   // of this rank
    byte* arena;  // of the sender, as it is mapped here
    uint64_t bytes;
    uint64_t number;  // the same at both ends, from 1, and larger than those before in its slot
    uint64_t before;  // STAGE: the message that must have been read from the slot; 0: none
    int32_t kind, peer;
    int32_t slot;
    int32_t reader;  // STAGE: the receiver of the message before
};

constexpr int TRANSFERS = 32;         // a bit for each
constexpr uint64_t PIECES = 1 << 24;  // of a part, at most

struct MessageArgs {
    MessageArena arena;
    Control* control;
    uint64_t* completed;  // set to `call` when all has ended, also by a failure; in host memory
    uint64_t call, timeout_ns;
    int32_t rank;
    int32_t launch;         // not that of another launch in flight
    int32_t first_channel;  // of block 0; the next blocks have the next channels
    int32_t count;
    MessageTransfer transfers[TRANSFERS];
};

// ---- What both ends, and the host, must compute alike.

RC_HOST_DEVICE int parts_of(const MessageShape& shape, uint64_t bytes) {
    const uint64_t pieces = (bytes + shape.piece_bytes - 1) / shape.piece_bytes;
    return pieces > uint64_t(shape.channels) ? shape.channels : pieces ? int(pieces) : 1;
}

// The channel of the first part: messages of different pairs, and the chunks of one, begin in different ones.
RC_HOST_DEVICE int first_channel_of(const MessageArgs& args, const MessageTransfer& transfer) {
    const MessageShape& shape = args.arena.layout.shape;
    const int from = transfer.kind == STAGE ? args.rank : transfer.peer;
    const int to = transfer.kind == STAGE ? transfer.peer : args.rank;
    return (from + 3 * to + transfer.slot * parts_of(shape, shape.slot_bytes)) % shape.channels;
}

// Fills in `first_channel`; returns the number of blocks to launch.
RC_HOST_DEVICE int plan_messages(MessageArgs& args) {
    const MessageShape& shape = args.arena.layout.shape;
    args.first_channel = args.count == 1 ? first_channel_of(args, args.transfers[0]) : 0;
    return args.count == 1 ? parts_of(shape, args.transfers[0].bytes) : shape.channels;
}

// ---- The kernel.

struct MessageKernel {
    const Ctx& ctx;
    const MessageArgs& args;
    const MessageShape& shape;
    const int channel;
    const uint64_t deadline;
    uint32_t* const steps;  // pieces that have moved, of each message; shared by the block, written by the owner

    RC_DEVICE MessageKernel(const Ctx& ctx, const MessageArgs& args)
        : ctx(ctx),
          args(args),
          shape(args.arena.layout.shape),
          channel((args.first_channel + ctx.block) % args.arena.layout.shape.channels),
          deadline(now_ns() + args.timeout_ns),
          steps(block_words(ctx)) {}

    RC_DEVICE void run() const {
        uint32_t open = start();
        for (uint32_t spins = 0; open;) {
            const uint32_t ready = block_or(ctx, poll(open));
            if (!ready && block_any(ctx, must_fail(spins++, open))) break;
            if (!ready) continue;
            spins = 0;
            RC_NO_UNROLL for (int i = 0; i < args.count; ++i) if (ready >> i & 1 && move(args.transfers[i], i)) open &=
                ~(1u << i);
        }
        end();
    }

    // Returns the messages that have a part in this channel.
    RC_DEVICE uint32_t start() const {
        if (block_any(ctx, load_relaxed(args.arena.broken()))) return 0;
        uint32_t open = 0;
        RC_NO_UNROLL for (int i = 0; i < args.count; ++i) if (index_of(args.transfers[i]) <
                                                              parts_of(shape, args.transfers[i].bytes)) open |= 1u << i;
        for (int i = ctx.thread; i < args.count; i += ctx.threads) steps[i] = 0;
        return open;
    }

    RC_DEVICE bool owns(int i) const { return i % ctx.threads == ctx.thread; }

    // ---- Waiting.

    // A piece can move when `flag` has reached `least`.
    struct Gate {
        const uint64_t* flag;
        uint64_t least;
    };

    RC_DEVICE Gate gate(const MessageTransfer& t, int i) const {
        if (t.kind == STAGE) return {args.arena.released(t.arena, t.slot), t.before};
        return {args.arena.staged(t.arena, channel, t.slot), t.number * PIECES + steps[i] + 1};
    }

    // Returns which of this thread's messages can move a piece.
    RC_DEVICE uint32_t poll(uint32_t open) const {
        uint32_t ready = 0;
        for (int i = ctx.thread; i < args.count; i += ctx.threads)
            if (open >> i & 1) ready |= uint32_t(is_ready(i)) << i;
        return ready;
    }

    RC_DEVICE bool is_ready(int i) const {
        const MessageTransfer& t = args.transfers[i];
        if (t.kind == STAGE && (steps[i] || !t.before)) return true;
        const Gate next = gate(t, i);
        if (load_acquire(next.flag) < next.least) return false;
        if (t.kind == STAGE) return true;
        const uint64_t got = load_relaxed(next.flag + 1);
        if (got != fingerprint(t)) report(MISMATCH, t, t.peer, fingerprint(t), got);
        return got == fingerprint(t);
    }

    // When nothing could move. The clock and the abort flag are read every 32 times: the host's memory is far.
    RC_DEVICE bool must_fail(uint32_t spins, uint32_t open) const {
        if (ctx.thread >= args.count) return false;
        pause(spins);
        if (spins % 32 != 31 || ctx.thread) return false;
        if (load_relaxed(args.arena.broken())) return true;
        const bool aborted = load_relaxed(&args.control->abort);
        if (!aborted && now_ns() < deadline) return false;
        int i = 0;
        while (!(open >> i & 1)) ++i;
        const MessageTransfer& t = args.transfers[i];
        const Gate next = gate(t, i);
        report(aborted           ? ABORTED
               : t.kind == STAGE ? NO_SLOT
                                 : NO_DATA,
               t, t.kind == STAGE ? t.reader : t.peer, next.least, load_relaxed(next.flag));
        return true;
    }

    RC_DEVICE void report(Reason reason, const MessageTransfer& t, int peer, uint64_t expected, uint64_t got) const {
        if (!claim(args.arena.broken())) return;
        args.control->failure = {args.call, t.number, expected, got, peer, channel, reason};
        store_release<SITE_END>(&args.control->failed, 1);  // to the host, so no site of its own
    }

    // ---- Moving.

    RC_DEVICE static uint64_t fingerprint(const MessageTransfer& t) { return mix(mix(1, t.number), t.bytes); }

    // Which part of the message this channel moves.
    RC_DEVICE int index_of(const MessageTransfer& t) const {
        const int index = channel - first_channel_of(args, t);
        return index < 0 ? index + shape.channels : index;
    }
    RC_DEVICE Range part_of(const MessageTransfer& t) const {
        const uint64_t each = round_up(divide_up(t.bytes, parts_of(shape, t.bytes)), PACK);
        const uint64_t begin = index_of(t) * each;
        return Range{0, t.bytes}.part(begin, begin + each);
    }

    // Moves the next piece; returns whether it was the last one.
    RC_DEVICE bool move(const MessageTransfer& t, int i) const {
        const uint32_t step = steps[i];
        const Range part = part_of(t),
                    piece = part.part(uint64_t(step) * shape.piece_bytes, (step + 1ull) * shape.piece_bytes);
        byte* const data = t.data + piece.begin;
        byte* const staged = args.arena.slot(t.arena, t.slot) + piece.begin;
        const bool out = t.kind == STAGE;
        copy(ctx, out ? staged : data, out ? data : staged, piece.bytes());
        block_sync(ctx);
        if (owns(i)) {
            if (out) publish(t, step);
            steps[i] = step + 1;
        }
        return piece.end == part.end;
    }

    RC_DEVICE void publish(const MessageTransfer& t, uint32_t step) const {
        uint64_t* const flag = args.arena.staged(t.arena, channel, t.slot);
        store_relaxed(flag + 1, fingerprint(t));
        store_release<SITE_MESSAGE_STAGED>(flag, t.number * PIECES + step + 1);
    }

    // The last block of the launch tells the senders and the host.
    RC_DEVICE void end() const {
        block_sync(ctx);
        if (ctx.thread || !last_of(args.arena.ended(args.launch), ctx.blocks)) return;
        const bool failed = load_relaxed(args.arena.broken());
        RC_NO_UNROLL for (int i = 0; !failed && i < args.count; ++i) {
            const MessageTransfer& t = args.transfers[i];
            if (t.kind == FETCH) store_release<SITE_MESSAGE_RELEASED>(args.arena.released(t.arena, t.slot), t.number);
        }
        store_release<SITE_END>(args.completed, args.call);
    }
};

RC_DEVICE void run_messages(const Ctx& ctx, const MessageArgs& args) { MessageKernel(ctx, args).run(); }

}  // namespace ringcomm::cuda
