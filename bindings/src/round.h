// One collective call in flight on this rank: its start record, its flags, its waits.
#pragma once

#include <bit>

#include "comm.h"

namespace ringcomm {

class Round final : public Watch {
public:
    Round(Comm& comm, Call& call, double timeout);

    const int rank, size;
    Comm& comm;
    const Call& call;

    // The start record. Publishing it also publishes what was laid down for chunk 0, unless the rank hopes for direct
    // access and says where its buffers are: then nothing is laid yet.
    void start(const Places* places = nullptr);
    bool hopes(int r) const { return record(r).signature & SIGNATURE_DIRECT; }
    // Waits for the start records of all ranks; throws RC_MISMATCH, after all have been read, if one differs. `beside`:
    // how much of what the peers lay in chunk 0 this rank reads; if it lies beside their records it is fetched while
    // waiting.
    void meet(size_t beside = 0);
    const Record& record(int r) const { return comm.header(r).records[call.epoch & 1]; }

    // Notes how the call is done.
    void goes(rc_way way, uint64_t chunks = 1) const {
        comm.way.store(chunks * RC_WAYS + way, std::memory_order_relaxed);
    }

    // Where rank r lays `bytes` in a chunk: beside its record if that holds it, else in the staging buffer.
    std::byte* laid(int r, uint64_t chunk, size_t bytes) const {
        if (bytes <= INLINE_BYTES && chunk == 0) return const_cast<std::byte*>(record(r).payload);
        return comm.arena().staging(r, (call.epoch & 1) * 2 + (chunk & 1));
    }
    void copy_in(std::byte* shared, const std::byte* own, size_t bytes) const;

    // The flags: `chunks` of them are done with.
    void staged(uint64_t chunks) { comm.publish_to_all<SITE_STAGED>(comm.mine().staged, position(call.epoch, chunks)); }
    void reduced(uint64_t chunks) {
        comm.publish_to_all<SITE_REDUCED>(comm.mine().reduced, position(call.epoch, chunks));
    }
    void collected(uint64_t chunks) {
        comm.publish_to_all<SITE_COLLECTED>(comm.mine().collected, position(call.epoch, chunks));
    }
    // Brings all flags up to this call, so that none is ever half a wrap behind.
    void refresh();
    void check_chunks(uint64_t chunks) const;  // positions hold so many; all ranks throw alike
    void await_staged(int r, uint64_t chunk);
    void await_reduced(int r, uint64_t chunks) { await(comm.header(r).reduced, position(call.epoch, chunks), r); }
    void await_collected(int r, uint64_t chunks) { await(comm.header(r).collected, position(call.epoch, chunks), r); }

    // Throws if the call has failed somewhere, or a rank that is still needed has gone.
    void check();
    // Copies from the private memory of rank r, through the kernel; what cannot be read any more is a failure.
    void read(int r, std::byte* target, const std::byte* address, size_t bytes);

    uint64_t start_time() const { return start_time_; }
    uint64_t signature() const { return signature_; }
    uint64_t count() const { return record_count_; }

private:
    void await(const Flag& flag, uint64_t value, int peer, size_t lines = 1);
    void compare_counts() const;  // of all_to_all; throws if two ranks differ
    Lines differences_here() const;
    [[noreturn]] void mismatch(const Lines& differences, int other) const;
    std::optional<Failure> look() override;
    std::optional<Failure> broken();  // what ends the call, but for its time
    [[noreturn]] void fail(const Failure& failure) override;
    void late() override;
    uint64_t deadline() const override { return deadline_of(start_time_, timeout_); }
    std::string words() const { return words(record(rank)); }
    // `extra` is a hash of the counts, or the factor of premul_sum.
    std::string words(const Record& record) const {
        return describe(record.signature, record.count, std::bit_cast<double>(record.extra));
    }
    Failure timed_out() const;

    double timeout_;
    uint64_t start_time_, signature_, record_count_, extra_;
    int peer_ = -1;
    bool late_ = false;
};

void run_collective(Round& round);  // kernels/cpu/collectives.cpp

}  // namespace ringcomm
