// One collective in flight on this rank: its start record, flags and waits.
#pragma once

#include "core/running_collective.h"
#include "kernels/cpu/kernels.h"
#include "shm/group.h"

namespace ringcomm {

// What was called, without how a rank takes part.
inline Signature signature_in(const StartRecord& record) {
    Signature signature = record.signature;
    signature.word &= ~SIGNATURE_DIRECT;
    return signature;
}

// The part of a call that runs: all of it, or what comes before the first wait, or what comes after.
enum class Part { WHOLE, START, REST };

class CollectiveOp final : public RunningCollective {
public:
    CollectiveOp(ShmGroup& group, const CallRecord& call, Part part);

    ShmGroup& group;
    const Part part;
    const int awaited;  // the ranks whose start records this one awaits: see ShmGroup::awaited()

    // Publishes the start record, and with it chunk 0, the `staged_bytes` that `stage` fills; or, for a rank that wants
    // direct access, its buffers, and then nothing is staged yet. Returns whether the rest of the call is to follow.
    template <class Stage>
    bool start(size_t staged_bytes, Stage stage, const DirectBuffers* buffers = nullptr) {
        if (part == Part::REST) return true;
        await_room(staged_bytes);
        if (!buffers) stage();
        publish_start(buffers);
        return part == Part::WHOLE;
    }
    bool wants_direct(int r) const { return record(r).signature.word & SIGNATURE_DIRECT; }
    // Waits for the start records of the ranks that this one awaits; after reading all, throws RC_MISMATCH if the
    // signatures differ. `inlined`: the bytes of each peer's chunk 0 that this rank reads; if they fit in the record
    // they are prefetched meanwhile.
    void await_starts(size_t inlined = 0);
    // Waits for the start records of all ranks, of which it prefetches so many lines; throws RC_MISMATCH if the
    // signatures differ.
    void confirm(size_t lines = 1);
    const StartRecord& record(int r) const { return record(r, call.epoch); }

    // Where rank r stages `bytes` of a chunk: in its start record if they fit, else in a staging buffer.
    std::byte* staging(int r, uint64_t chunk, size_t bytes) const {
        if (bytes <= INLINE_BYTES && chunk == 0) return const_cast<std::byte*>(record(r).payload);
        return group.arena().staging(r, (call.epoch & 1) * 2 + (chunk & 1));
    }
    // Non-temporal stores where they are `gain` times as fast.
    void copy_in(std::byte* shared, const std::byte* own, size_t bytes, double gain = 1.2) const {
        group.staging_stores.copy(shared, own, bytes, gain);
    }
    void copy_out(std::byte* target, const std::byte* source, size_t bytes) const {
        group.output_stores.copy(target, source, bytes);
    }

    // Publish that this rank is done with `chunks` chunks.
    void publish_staged(uint64_t chunks) { publish<SITE_STAGED>(group.mine().staged, chunks); }
    void publish_reduced(uint64_t chunks) { publish<SITE_REDUCED>(group.mine().reduced, chunks); }
    void publish_collected(uint64_t chunks) { publish<SITE_COLLECTED>(group.mine().collected, chunks); }
    // Advances all flags to this call, so that none falls half a wrap behind.
    void refresh_flags();
    void check_chunk_count(uint64_t chunks) const;  // positions count that many; throws on all ranks
    void await_staged(int r, uint64_t chunk);
    void await_reduced(int r, uint64_t chunks) { await(group.header(r).reduced, position(call.epoch, chunks), r); }
    void await_collected(int r, uint64_t chunks) { await(group.header(r).collected, position(call.epoch, chunks), r); }

    // Throws if the call has failed on some rank, or a rank that it needs has died or closed.
    void check();
    // Copies from the private memory of rank r by CMA; memory that can no longer be read is a failure.
    void read(int r, std::byte* target, const std::byte* address, size_t bytes);

private:
    const StartRecord& record(int r, uint64_t epoch) const { return group.record(r, epoch); }
    // Before chunk 0 is written: until no rank reads what was there before.
    void await_room(size_t staged_bytes);
    void publish_start(const DirectBuffers* buffers);
    // Compares the records of all ranks of the calls up to `last`, and keeps the mismatch of one that has returned
    // here.
    void verify(uint64_t last) {
        if (group.verified < last) compare_up_to(last);
    }
    void compare_up_to(uint64_t last);
    bool differs(int p, size_t lines) {  // waits for its start record
        await(record(p).epoch, call.epoch, p, lines);
        return signature_in(record(p)) != call.signature;
    }
    // Not inline: a Failure takes 4 KiB of the stack.
    [[gnu::noinline]] Failure mismatch_of(uint64_t epoch, int other) const {
        return mismatch(epoch, other, [&](int r) -> const Signature& { return record(r, epoch).signature; });
    }
    template <Site site>
    void publish(Flag& flag, uint64_t chunks) {
        group.publish_to_all<site>(flag, position(call.epoch, chunks));
    }
    void await(const Flag& flag, uint64_t value, int peer, size_t lines = 1);
    bool has_finished(int r) const override { return observe(group.header(r).finished) >= call.epoch; }
    void on_long_wait() override {
        late_ = true;
        group.set_waits_for(peer_);
    }
    uint64_t spin_again_ns() const override { return group.spin_policy.spin_ns; }
    Failure timed_out() override;

    uint64_t awaited_epoch_;  // the call whose records this rank waits for
    int peer_ = -1;
    bool late_ = false;
};

}  // namespace ringcomm
