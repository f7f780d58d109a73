// Access to the buffers of other ranks without staging, where the start records of all ranks allow it.
#pragma once

#include <cstring>

#include "round.h"

namespace ringcomm {

constexpr int EVERYBODY = -1, NO_ONE = -2;

inline bool is(int who, int rank) { return who == EVERYBODY || who == rank; }

inline void copy_block(std::byte* target, const std::byte* source, size_t bytes) {
    if (target != source && bytes) memcpy(target, source, bytes);
}

// What a rank lets its peers do.
struct Offer {
    size_t source_bytes, target_bytes;  // of this rank's buffers others may read and write so much; 0: nothing
    size_t block;                       // what one rank takes from another, at most; 0: only symmetric buffers will do
    bool copies = false;                // it is worth while to let the kernel copy blocks out of sources
};

// Whose sources a direct form reads, and whose targets it writes.
struct Needs {
    int source, target;
};

// There are three ways, and all ranks take the same one, because it follows from the records:
//   symmetric    the buffers lie at the same place of a range of the file, which all have mapped;
//   Access::LOAD the ranks are threads of one process: buffers lie anywhere;
//   Access::COPY the kernel copies out of the private memory of another process: sources only.
class Direct {
public:
    Direct(Round& round, const Offer& offer);
    // If the call fails: no rank may return while threads of its process still use its memory.
    ~Direct();
    Direct(const Direct&) = delete;

    // Then nothing is staged before all have met.
    bool hope() const { return mine_.source_key || mine_.target_key || mine_.access != Access::NONE; }
    void start();
    // After meet().
    bool agreed(Needs needs);

    // The buffers of rank r; not if the kernel is needed to copy.
    const std::byte* source(int r) const { return source_ ? source_->at(source_key_, r) : places(r).source; }
    std::byte* target(int r) const { return target_ ? target_->at(target_key_, r) : places(r).target; }
    // Copies what lies `at` bytes from the beginning of the source of rank r; any way will do.
    void copy_source(int r, size_t at, std::byte* to, size_t bytes) const;

    // No rank may leave before all are through with its buffers.
    void finish();

private:
    Access offered(const Offer& offer) const;
    // Not from this rank's own record, whose lines are with the peers.
    bool hopes(int r) const { return r == round_.rank ? hope() : round_.hopes(r); }
    const Places& places(int r) const { return r == round_.rank ? mine_ : round_.record(r).places; }
    uint64_t common(int who, uint64_t Places::* key) const;
    Access common_access() const;

    Round& round_;
    Places mine_{};
    std::shared_ptr<Region> source_, target_;
    uint64_t source_key_ = 0, target_key_ = 0;
    Access access_ = Access::NONE;
    bool exposed_ = false;  // threads of this process may be using this rank's memory
};

}  // namespace ringcomm
