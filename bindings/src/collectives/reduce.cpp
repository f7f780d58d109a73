// all_reduce and reduce.
#include "collectives/exchange.h"
#include "collectives/tree.h"

namespace ringcomm {

namespace {

// An array divided into one segment per rank, in whole cache lines.
struct Segments {
    uint64_t count, segment;

    Segments(uint64_t count, int n, size_t item) : count(count), segment(round_up(divide_up(count, n), 64 / item)) {}
    uint64_t begin(int r) const { return std::min(count, r * segment); }
    uint64_t length(int r) const { return std::min(count, (r + 1) * segment) - begin(r); }
};

// Large all_reduce and reduce. Rank j owns segment j of each chunk. Every rank stages the segments of the others; the
// owner reduces its own input and the staged ones in rank order, and stages the result; the readers collect it. Each
// rank reads or writes (5 - 2/n) S bytes. The stages of three chunks overlap, so that a rank waits only for flags that
// were published a whole stage ago.
class TwoStage {
public:
    TwoStage(CollectiveOp& op, int reader)
        : op_(op),
          call_(op.call),
          n_(op.size),
          me_(op.rank),
          reader_(reader),
          piece_(Chunking(op, n_).piece),
          chunk_(piece_ / call_.item * n_),
          chunks_(divide_up(call_.count, chunk_)) {}

    void run(DirectAccess& direct) {
        if (!direct.start(n_ * piece_, [&] { stage(0); })) return;
        op_.await_starts();
        if (direct.negotiate({ALL_RANKS, reader_})) return reduce_direct(direct);
        direct.decline();
        op_.check_chunk_count(chunks_);
        op_.set_path(RC_PATH_TWO_STAGE, chunks_);
        if (direct.wanted()) {
            stage(0);
            op_.publish_staged(1);
        }
        for (uint64_t step = 1; step < chunks_ + 2; ++step) {
            if (step < chunks_) {
                for (int p = 0; p < n_ && step >= 2; ++p) {
                    if (p != me_) op_.await_reduced(p, step - 1);
                }
                stage(step);
                op_.publish_staged(step + 1);
            }
            if (step - 1 < chunks_) reduce_segment(step - 1);
            if (step >= 2 && includes(reader_, me_)) collect(step - 2);
        }
    }

private:
    Segments segments(uint64_t k) const { return {std::min(call_.count - k * chunk_, chunk_), n_, call_.item}; }
    // In the buffer of rank r. The short last chunk uses the same stride: a peer may still read the result slot of an
    // earlier chunk.
    std::byte* slot(int r, int owner, uint64_t k) const {
        return op_.group.arena().staging(r, (call_.epoch & 1) * 2 + (k & 1)) + owner * piece_;
    }
    size_t offset(uint64_t k, const Segments& s, int r) const { return (k * chunk_ + s.begin(r)) * call_.item; }

    void stage(uint64_t k) {
        const Segments s = segments(k);
        for (int p = 0; p < n_; ++p) {
            if (p == me_) continue;
            op_.group.staging_stores.copy(slot(me_, p, k), call_.source + offset(k, s, p), s.length(p) * call_.item,
                                          GAIN);
        }
    }

    void reduce_segment(uint64_t k) {
        const Segments s = segments(k);
        const bool reads = includes(reader_, me_), published = reader_ != me_;
        const void** sources = op_.group.sources.data();
        for (int p = 0; p < n_; ++p) {
            if (p == me_) continue;
            op_.await_staged(p, k);
            if (published && k >= 2 && includes(reader_, p)) op_.await_collected(p, k - 1);
        }
        const size_t bytes = s.length(me_) * call_.item;
        const bool streams = op_.group.staging_stores.nontemporal(bytes, GAIN);
        for (size_t at = 0; at < bytes; at += TILE_BYTES) {
            const size_t length = std::min(TILE_BYTES, bytes - at);
            for (int p = 0; p < n_; ++p) {
                sources[p] = p == me_ ? call_.source + offset(k, s, me_) + at : slot(p, me_, k) + at;
            }
            std::byte* result = reads ? call_.target + offset(k, s, me_) + at : op_.group.tile.data();
            reduce_blocks(call_, result, sources, n_, length / call_.item);
            if (published) copy_block(slot(me_, me_, k) + at, result, length, streams);
        }
        op_.publish_reduced(k + 1);
    }

    void collect(uint64_t k) {
        const Segments s = segments(k);
        for (int p = 0; p < n_; ++p) {
            if (p == me_) continue;
            op_.await_reduced(p, k + 1);
            copy_block(call_.target + offset(k, s, p), slot(p, p, k), s.length(p) * call_.item);
        }
        if (chunks_ > 2) op_.publish_collected(k + 1);
    }

    // The direct path: the owner reads segment j of every source and writes segment j of every target, 2 S bytes per
    // rank. No other rank accesses segment j, so it also works in place.
    void reduce_direct(DirectAccess& direct) {
        const Segments s(call_.count, n_, call_.item);
        const size_t begin = s.begin(me_) * call_.item, bytes = s.length(me_) * call_.item;
        const void** sources = op_.group.sources.data();
        const int home = reader_ == ALL_RANKS ? me_ : reader_;
        for (size_t at = begin; at < begin + bytes; at += TILE_BYTES) {
            const size_t length = std::min(TILE_BYTES, begin + bytes - at);
            for (int p = 0; p < n_; ++p) sources[p] = direct.source(p) + at;
            reduce_blocks(call_, direct.target(home) + at, sources, n_, length / call_.item);
            for (int p = 0; p < n_; ++p) {
                if (p != home && includes(reader_, p))
                    op_.copy_in(direct.target(p) + at, direct.target(home) + at, length);
            }
        }
        direct.finish();
    }

    // Below, non-temporal stores make the call slower: each rank waits for blocks from memory (1 MiB on Zen 4, a gain
    // of 1 to 1.2: 185 us in place of 110).
    static constexpr double GAIN = 2;

    CollectiveOp& op_;
    const CallRecord& call_;
    const int n_, me_, reader_;
    const size_t piece_;             // bytes of a full segment
    const uint64_t chunk_, chunks_;  // elements of a chunk; number of chunks
};

}  // namespace

// Small all_reduce and reduce: every rank stages its whole array, and every reader reduces them all.
void reduce_one_shot(CollectiveOp& op, int reader) {
    const CallRecord& call = op.call;
    const size_t bytes = call.bytes();
    const auto stage = [&] {
        if (op.rank != reader) op.copy_in(op.staging(op.rank, 0, bytes), call.source, bytes);
    };
    if (!op.start(bytes, stage)) return;
    const auto reduce = [&](const void** sources, std::byte* result) {
        reduce_blocks(call, result, sources, op.size, call.count);
    };
    if (reader == ALL_RANKS && TreePass(op, bytes, bytes).run(reduce)) return;
    op.await_starts(includes(reader, op.rank) ? bytes : 0);
    if (!includes(reader, op.rank)) return;
    const void** sources = op.group.sources.data();
    for (int p = 0; p < op.size; ++p) sources[p] = p == op.rank ? call.source : op.staging(p, 0, bytes);
    reduce(sources, call.target);
}

void reduce_in_two_stages(CollectiveOp& op, int reader) {
    const size_t bytes = op.call.bytes();
    DirectAccess direct(op, {bytes, includes(reader, op.rank) ? bytes : 0, bytes});
    TwoStage(op, reader).run(direct);
}

}  // namespace ringcomm
