// CollectiveOp: one collective in flight on this rank.
#include "collectives/collective_op.h"

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstring>
#include <thread>
#include <utility>

#include "core/collectives.h"
#include "core/errors.h"

namespace ringcomm {

CollectiveOp::CollectiveOp(ShmGroup& group, const CallRecord& call, Part part)
    : RunningCollective(group, call),
      group(group),
      part(part),
      awaited(group.awaited(call)),
      awaited_epoch_(call.epoch) {
    if (group.is_one_way(call)) group.last_one_way = call.epoch;
}

void CollectiveOp::await_room(size_t staged_bytes) {
    // A count per pair of ranks: await_starts() compares them all.
    const bool counts = call.counts && collectives[call.collective].exchanges();
    // Staging buffers and counts have room for two calls.
    verify(staged_bytes > INLINE_BYTES || counts ? call.epoch - 1
                                                 : call.epoch - std::min(call.epoch, group.run_ahead()));
    if (counts) memcpy(group.arena().counts(rank, call.epoch), call.counts, 2 * size * sizeof(uint64_t));
}

void CollectiveOp::publish_start(const DirectBuffers* buffers) {
    StartRecord& record = group.record(rank, call.epoch);
    record.signature = call.signature;
    if (buffers) {
        record.signature.word |= SIGNATURE_DIRECT;
        record.buffers = *buffers;
    }
    group.world->placement.publish_core(group.memory().members[rank]);
    group.publish_to_all<SITE_START>(record.epoch, call.epoch);
}

void CollectiveOp::await_starts(size_t inlined) {
    const size_t lines = inlined <= INLINE_BYTES ? divide_up(RECORD_HEAD + inlined, 64) : 1;
    if (awaited == NO_RANK || (awaited >= 0 && !differs(awaited, lines))) return;  // if it differs, all are named
    confirm(lines);
    if (!collectives[call.collective].exchanges() || !call.counts) return;
    compare_counts([&](int r) { return group.arena().counts(r, call.epoch); });
}

void CollectiveOp::confirm(size_t lines) {
    int other = NO_RANK;
    for (int p = 0; p < size; ++p) {
        // This rank's own line is with the peers now: reading it would fetch it back.
        if (p != rank && differs(p, lines)) other = p;
    }
    verify(call.epoch - 1);  // all ranks have started those
    group.verified = call.epoch;
    if (other != NO_RANK) throw mismatch_of(call.epoch, other);
}

void CollectiveOp::compare_up_to(uint64_t last) {
    for (uint64_t epoch = group.verified + 1; epoch <= last; group.verified = epoch++) {
        int other = NO_RANK;
        awaited_epoch_ = epoch;
        for (int p = 0; p < size; ++p) {
            if (p == rank) continue;
            await(record(p, epoch).epoch, epoch, p);
            if (signature_in(record(p, epoch)) != signature_in(record(rank, epoch))) other = p;
        }
        if (other != NO_RANK) group.returned_failure.keep(mismatch_of(epoch, other));
    }
    awaited_epoch_ = call.epoch;
}

void CollectiveOp::refresh_flags() {
    publish_staged(0);
    publish_reduced(0);
    publish_collected(0);
}

void CollectiveOp::check_chunk_count(uint64_t chunks) const {
    if (chunks < MOST_CHUNKS) return;
    throw Failure(RC_ARGUMENT,
                  describe(call.signature) + format(" would take %" PRIu64 " chunks; expected less than %" PRIu64
                                                    ": give the communicator a larger arena",
                                                    chunks, MOST_CHUNKS),
                  rank);
}

void CollectiveOp::await_staged(int r, uint64_t chunk) {
    // The start record publishes chunk 0, unless the rank wanted direct access.
    if (chunk > 0 || wants_direct(r)) {
        await(group.header(r).staged, position(call.epoch, chunk + 1), r);
    }
}

void CollectiveOp::check() {
    if (const auto failure = lost_reason()) fail(*failure);
}

void CollectiveOp::read(int r, std::byte* target, const std::byte* address, size_t bytes) {
    // Of two ranks the other one may be waiting for the end of this copy. It is woken when as much is left as takes the
    // time of a wake-up, some 100 us, so that it spins then.
    constexpr size_t LAST = 1 << 20;
    const bool wakes = size == 2 && spin_again_ns() > 0;
    const auto read_part = [&](size_t begin, size_t end) {
        return group.world->cma.read(group.memory().members[r], target + begin, address + begin, end - begin);
    };
    const size_t begun = wakes ? bytes - std::min(bytes, LAST) : 0;
    if (read_part(0, begun)) {
        if (wakes) ring(group.header(r).doorbell, rank);
        if (read_part(begun, bytes)) return;
    }
    const std::string why = strerror(errno);
    // Either the rank has failed and left, which it published before, or its process has ended, which shows a little
    // later.
    about_to_wait();
    for (int i = 0; i < 1000; ++i) {
        check();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fail(Failure(RC_SYSTEM, format("rank %d cannot read the memory of rank %d: ", rank, r) + why, r));
}

// Every poll also prefetches the lines behind the flag: they arrive with the flag, and not one transfer between cores
// later.
void CollectiveOp::await(const Flag& flag, uint64_t value, int peer, size_t lines) {
    const auto ready = [&] {
        for (size_t line = 1; line < lines; ++line)
            __builtin_prefetch(reinterpret_cast<const char*>(&flag) + line * 64);
        return int64_t(observe(flag) - value) >= 0;
    };
    if (ready()) return;
    peer_ = peer;
    Waits* const waits = group.waits;
    const uint64_t begin = waits ? ticks() : 0;
    wait_until(ready, OneSleeper{group.mine().doorbell, peer}, group.spin_policy, *this);
    if (waits) waits->add(ticks() - begin, peer);
    if (std::exchange(late_, false)) group.flight.clear_waits_for();
}

Failure CollectiveOp::timed_out() {
    std::vector<int> missing;
    for (int p = 0; p < size; ++p) {
        if (observe(record(p, awaited_epoch_).epoch) < awaited_epoch_) missing.push_back(p);
    }
    const std::string what = awaited_epoch_ == call.epoch ? std::string("it")
                                                          : describe(record(rank, awaited_epoch_).signature) +
                                                                format(" (epoch %" PRIu64 ")", awaited_epoch_);
    const std::string why = missing.empty() ? format("rank %d made no progress", peer_)
                                            : what + " was not called by " + name_ranks(missing);
    return timeout(why, missing, peer_);
}

}  // namespace ringcomm
