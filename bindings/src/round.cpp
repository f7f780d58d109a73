#include "round.h"

#include <bit>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstring>
#include <thread>
#include <utility>

#include "errors.h"

namespace ringcomm {

namespace {

uint64_t mix(uint64_t hash, uint64_t value) {  // the finaliser of SplitMix64 over a running sum
    hash += value + 0x9e3779b97f4a7c15;
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
    return hash ^ hash >> 31;
}

}  // namespace

Round::Round(Comm& comm, Call& call, double timeout)
    : rank(comm.rank),
      size(comm.size),
      comm(comm),
      call(call),
      timeout_(timeout < 0 ? comm.tuning().timeout : timeout),
      start_time_(tick_ns()),
      signature_(pack(call.collective, call.dtype, call.op, call.root, call.counts != nullptr)),
      record_count_(call.count),
      extra_(call.op == RC_PREMUL_SUM ? std::bit_cast<uint64_t>(call.factor) : 0) {
    if (!call.counts) return;
    if (call.collective == RC_ALL_TO_ALL) {  // each pair has its own count: they travel whole, and meet() compares them
        record_count_ = 0;
        if (size > 1) memcpy(comm.arena().counts(rank, call.epoch), call.counts, 2 * size * sizeof(uint64_t));
    } else {
        record_count_ = 0;
        for (int p = 0; p < size; ++p) {
            record_count_ += call.counts[p];
            extra_ = mix(extra_, call.counts[p]);
        }
    }
}

void Round::copy_in(std::byte* shared, const std::byte* own, size_t bytes) const {
    if (bytes == 0) return;
    if (bytes >= comm.tuning().stream_bytes) {
        kernels().copy_stream(shared, own, bytes);
    } else {
        memcpy(shared, own, bytes);
    }
}

void Round::start(const Places* places) {
    Record& record = comm.mine().records[call.epoch & 1];
    record.signature = signature_ | (places ? SIGNATURE_DIRECT : 0);
    record.count = record_count_;
    record.extra = extra_;
    if (places) record.places = *places;
    comm.publish_to_all<SITE_START>(record.epoch, call.epoch);
}

void Round::meet(size_t beside) {
    const size_t lines = beside <= INLINE_BYTES ? divide_up(RECORD_HEAD + beside, 64) : 1;
    int other = -1;
    for (int p = 0; p < size; ++p) {
        if (p == rank) continue;  // the line is with the peers now: reading it would bring it back
        const Record& theirs = record(p);
        await(theirs.epoch, call.epoch, p, lines);
        if ((theirs.signature & ~SIGNATURE_DIRECT) != signature_ || theirs.count != record_count_ ||
            theirs.extra != extra_) {
            other = p;
        }
    }
    if (other >= 0) {
        Lines differences = differences_here();
        for (int p = 0; p < size; ++p) {
            const Record& theirs = record(p);
            const bool counts = call.counts && theirs.extra != extra_;
            differences.add(format("  rank %d: ", p) + words(theirs) +
                            (counts ? format(", other counts than on rank %d", rank) : ""));
        }
        mismatch(differences, other);
    }
    if (call.collective == RC_ALL_TO_ALL && call.counts) compare_counts();
}

void Round::compare_counts() const {
    int other = -1;
    std::optional<Lines> differences;
    for (int p = 0; p < size; ++p) {
        for (int q = 0; q < size; ++q) {
            const uint64_t sent = comm.arena().counts(p, call.epoch)[q];
            const uint64_t expected = comm.arena().counts(q, call.epoch)[size + p];
            if (sent == expected) continue;
            if (other < 0 || p == rank || q == rank) other = p == rank ? q : p;
            if (!differences) differences = differences_here();
            differences->add(format("  rank %d sends %" PRIu64 " elements to rank %d, which expects %" PRIu64, p, sent,
                                    q, expected));
        }
    }
    if (differences) mismatch(*differences, other);
}

Lines Round::differences_here() const {
    return Lines(format("the ranks called different things at epoch %" PRIu64 ":", call.epoch));
}

void Round::mismatch(const Lines& differences, int other) const {
    Failure mismatch(RC_MISMATCH, differences.text(), other);
    copy_text(mismatch.error.expected, sizeof mismatch.error.expected, words());
    copy_text(mismatch.error.got, sizeof mismatch.error.got, words(record(other)));
    throw mismatch;
}

void Round::refresh() {
    staged(0);
    reduced(0);
    collected(0);
}

void Round::check_chunks(uint64_t chunks) const {
    if (chunks < MOST_CHUNKS) return;
    throw Failure(RC_ARGUMENT,
                  words() + format(" would take %" PRIu64 " chunks; expected less than %" PRIu64
                                   ": give the communicator a larger arena",
                                   chunks, MOST_CHUNKS),
                  rank);
}

void Round::await_staged(int r, uint64_t chunk) {
    // Chunk 0 came with the start record, unless the rank hoped for direct access.
    if (chunk > 0 || hopes(r)) {
        await(comm.header(r).staged, position(call.epoch, chunk + 1), r);
    }
}

void Round::check() {
    if (const auto failure = broken()) fail(*failure);
}

void Round::read(int r, std::byte* target, const std::byte* address, size_t bytes) {
    if (comm.world->reach.read(comm.group().members[r], target, address, bytes)) return;
    const std::string why = strerror(errno);
    // Either the rank has failed and left, and said so before, or its process ends, which shows a little later.
    for (int i = 0; i < 1000; ++i) {
        check();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fail(Failure(RC_SYSTEM, format("rank %d cannot read the memory of rank %d: ", rank, r) + why, r));
}

// The further lines behind the flag are asked for at every look: when the flag comes they do as well, and not one
// transfer between the cores later.
void Round::await(const Flag& flag, uint64_t value, int peer, size_t lines) {
    const auto ready = [&] {
        for (size_t line = 1; line < lines; ++line)
            __builtin_prefetch(reinterpret_cast<const char*>(&flag) + line * 64);
        return int64_t(observe(flag) - value) >= 0;
    };
    if (ready()) return;
    peer_ = peer;
    wait_until(ready, comm.mine().bell, OneSleeper{peer}, comm.patience, *this);
    if (std::exchange(late_, false)) comm.mine().waits_for.store(0, std::memory_order_relaxed);
}

void Round::late() {
    late_ = true;
    comm.mine().waits_for.store(peer_ + 1, std::memory_order_relaxed);
}

std::optional<Failure> Round::look() {
    if (auto failure = broken()) return failure;
    if (now_ns() >= deadline()) return timed_out();
    return {};
}

std::optional<Failure> Round::broken() {
    if (auto failure = comm.look(kind_name(call.collective))) return failure;
    for (int p = 0; p < size; ++p) {
        // Who has finished this call owes nothing, and may go: asked in this order, for it finishes before it goes.
        auto failure = p == rank ? std::nullopt : comm.gone(p, words());
        if (failure && observe(comm.header(p).finished) < call.epoch) return failure;
    }
    return {};
}

void Round::fail(const Failure& failure) {
    Failure told(failure);
    told.error.collective = call.collective;
    told.error.epoch = call.epoch;
    comm.fail(told);
}

Failure Round::timed_out() const {
    std::vector<int> missing;
    std::string names;
    for (int p = 0; p < size; ++p) {
        if (observe(record(p).epoch) >= call.epoch) continue;
        missing.push_back(p);
        names += format("%s%d", names.empty() ? "" : ", ", p);
    }
    const int culprit = missing.empty() ? peer_ : missing[0];
    const std::string why =
        missing.empty() ? format("rank %d did not go on", culprit) : "it was not called by rank " + names;
    const std::string message = format("rank %d waited %.3g s in ", rank, timeout_) + words() +
                                format(" (epoch %" PRIu64 "): ", call.epoch) + why;
    return Failure(RC_TIMEOUT, comm.with_report(message, missing), culprit);
}

}  // namespace ringcomm
