// all_reduce and reduce.
#include "exchange.h"

namespace ringcomm {

namespace {

// all_reduce and reduce, small: everybody lays everything down, and the readers reduce it all, each for itself.
void reduce_one_shot(Round& round, int reader) {
    const Call& call = round.call;
    const size_t bytes = call.bytes();
    round.goes(RC_ONE_SHOT);
    if (round.rank != reader || reader == EVERYBODY) {
        round.copy_in(round.laid(round.rank, 0, bytes), call.source, bytes);
    }
    round.start();
    round.meet(is(reader, round.rank) ? bytes : 0);
    if (!is(reader, round.rank)) return;
    const void** sources = round.comm.sources.data();
    for (int p = 0; p < round.size; ++p) sources[p] = p == round.rank ? call.source : round.laid(p, 0, bytes);
    reduce_blocks(call, call.target, sources, round.size, call.count);
}

// An array divided into one segment for each rank, whole cache lines each.
struct Segments {
    uint64_t count, segment;

    Segments(uint64_t count, int n, size_t item) : count(count), segment(round_up(divide_up(count, n), 64 / item)) {}
    uint64_t begin(int r) const { return std::min(count, r * segment); }
    uint64_t length(int r) const { return std::min(count, (r + 1) * segment) - begin(r); }
};

// all_reduce and reduce, large. Rank j owns segment j of each chunk. Everybody stages the segments of the others; the
// owner reduces its own input and what the others staged, in rank order, and stages the result; the readers collect it.
// (5 - 2/n) S bytes are read or written per rank. The stages of three chunks overlap, so that nobody waits for a flag
// that was not published a whole stage ago.
class TwoStage {
public:
    TwoStage(Round& round, int reader)
        : round_(round),
          call_(round.call),
          n_(round.size),
          me_(round.rank),
          reader_(reader),
          piece_(Pieces(round, n_).piece),
          chunk_(piece_ / call_.item * n_),
          chunks_(divide_up(call_.count, chunk_)) {}

    void run(Direct& direct) {
        if (!direct.hope()) lay(0);
        direct.start();
        round_.meet();
        if (direct.agreed({EVERYBODY, reader_})) return reduce_direct(direct);
        round_.check_chunks(chunks_);
        round_.goes(RC_TWO_STAGES, chunks_);
        if (direct.hope()) {
            lay(0);
            round_.staged(1);
        }
        for (uint64_t step = 1; step < chunks_ + 2; ++step) {
            if (step < chunks_) {
                for (int p = 0; p < n_ && step >= 2; ++p) {
                    if (p != me_) round_.await_reduced(p, step - 1);
                }
                lay(step);
                round_.staged(step + 1);
            }
            if (step - 1 < chunks_) reduce_segment(step - 1);
            if (step >= 2 && is(reader_, me_)) collect(step - 2);
        }
    }

private:
    Segments segments(uint64_t k) const { return {std::min(call_.count - k * chunk_, chunk_), n_, call_.item}; }
    // In the buffer of rank r. As far apart in the short last chunk as in the others: the result slot of an earlier
    // chunk may still be read when the staged ones are not.
    std::byte* slot(int r, int owner, uint64_t k) const {
        return round_.comm.arena().staging(r, (call_.epoch & 1) * 2 + (k & 1)) + owner * piece_;
    }
    size_t offset(uint64_t k, const Segments& s, int r) const { return (k * chunk_ + s.begin(r)) * call_.item; }

    void lay(uint64_t k) {
        const Segments s = segments(k);
        for (int p = 0; p < n_; ++p) {
            if (p != me_) round_.copy_in(slot(me_, p, k), call_.source + offset(k, s, p), s.length(p) * call_.item);
        }
    }

    void reduce_segment(uint64_t k) {
        const Segments s = segments(k);
        const bool reads = is(reader_, me_), published = reader_ != me_;
        const void** sources = round_.comm.sources.data();
        for (int p = 0; p < n_; ++p) {
            if (p == me_) continue;
            round_.await_staged(p, k);
            if (published && k >= 2 && is(reader_, p)) round_.await_collected(p, k - 1);
        }
        const size_t bytes = s.length(me_) * call_.item;
        for (size_t at = 0; at < bytes; at += TILE_BYTES) {
            const size_t length = std::min(TILE_BYTES, bytes - at);
            for (int p = 0; p < n_; ++p) {
                sources[p] = p == me_ ? call_.source + offset(k, s, me_) + at : slot(p, me_, k) + at;
            }
            std::byte* result = reads ? call_.target + offset(k, s, me_) + at : round_.comm.tile.data();
            reduce_blocks(call_, result, sources, n_, length / call_.item);
            if (published) round_.copy_in(slot(me_, me_, k) + at, result, length);
        }
        round_.reduced(k + 1);
    }

    void collect(uint64_t k) {
        const Segments s = segments(k);
        for (int p = 0; p < n_; ++p) {
            if (p == me_) continue;
            round_.await_reduced(p, k + 1);
            copy_block(call_.target + offset(k, s, p), slot(p, p, k), s.length(p) * call_.item);
        }
        if (chunks_ > 2) round_.collected(k + 1);
    }

    // Symmetric buffers: the owner reads segment j of every source and writes segment j of every target, 2 S bytes per
    // rank. Nobody else touches segment j, so it holds in place as well.
    void reduce_direct(Direct& direct) {
        const Segments s(call_.count, n_, call_.item);
        const size_t begin = s.begin(me_) * call_.item, bytes = s.length(me_) * call_.item;
        const void** sources = round_.comm.sources.data();
        const int home = reader_ == EVERYBODY ? me_ : reader_;
        for (size_t at = begin; at < begin + bytes; at += TILE_BYTES) {
            const size_t length = std::min(TILE_BYTES, begin + bytes - at);
            for (int p = 0; p < n_; ++p) sources[p] = direct.source(p) + at;
            reduce_blocks(call_, direct.target(home) + at, sources, n_, length / call_.item);
            for (int p = 0; p < n_; ++p) {
                if (p != home && is(reader_, p))
                    round_.copy_in(direct.target(p) + at, direct.target(home) + at, length);
            }
        }
        direct.finish();
    }

    Round& round_;
    const Call& call_;
    const int n_, me_, reader_;
    const size_t piece_;             // bytes of the largest segment
    const uint64_t chunk_, chunks_;  // elements of a chunk; how many chunks
};

}  // namespace

void reduce_to(Round& round, int reader) {
    const size_t bytes = round.call.bytes();
    Direct direct(round, {bytes, is(reader, round.rank) ? bytes : 0, bytes});
    // A rank cannot know whether its peers hope for direct access, so the path without it must follow from the size
    // alone.
    if (bytes <= std::min<size_t>(round.comm.tuning().small_bytes, round.comm.arena().layout.staging_bytes)) {
        return reduce_one_shot(round, reader);
    }
    TwoStage(round, reader).run(direct);
}

}  // namespace ringcomm
