// Access to the buffers of other ranks without staging, where the start records of all ranks allow it.
#pragma once

#include <vector>

#include "collectives/path.h"

namespace ringcomm {

// On the paths of threads and of CMA, buffers in the file are accessed there all the same.
class DirectAccess {
public:
    DirectAccess(CollectiveOp& op, const DirectOffer& offer) : op_(op), own_(offered_buffers(op, offer)) {}
    // After a failure, a rank ends its own access, and returns once no peer accesses its buffers.
    ~DirectAccess();
    DirectAccess(const DirectAccess&) = delete;

    // Then nothing is staged before negotiate().
    bool wanted() const { return offers_any(own_); }
    // CollectiveOp::start() with this rank's buffers.
    template <class Stage>
    bool start(size_t staged_bytes, Stage stage) {
        exposed_ = wanted();
        return op_.start(staged_bytes, stage, wanted() ? &own_ : nullptr);
    }
    // After await_starts(). Returns whether all ranks offer what the path needs.
    bool negotiate(DirectNeeds needs);
    // Then: whether they also offer more, for this rank to load and store.
    bool also_offered(DirectNeeds more);

    // The buffers of rank r, of those asked for, and of this rank; a source is nullptr if the kernel copies from it.
    const std::byte* source(int r) const { return sources_[r].get(); }
    std::byte* target(int r) const { return targets_[r].get(); }
    // What rank r passed, in its own addresses.
    const DirectBuffers& buffers(int r) const { return r == op_.rank ? own_ : op_.record(r).buffers; }
    // Copies from byte `at` of the source of rank r, on any path.
    void copy_source(int r, size_t at, std::byte* to, size_t bytes) const;

    // Waits until all ranks have finished with the buffers of this one.
    void finish();
    // The call is staged: no rank accesses these buffers.
    void decline() { exposed_ = false; }

private:
    void resolve(DirectNeeds needs);
    std::shared_ptr<std::byte> resolve(uint64_t location, const std::byte* address) const;

    CollectiveOp& op_;
    DirectBuffers own_;
    std::vector<std::shared_ptr<std::byte>> sources_, targets_;  // of each rank; they keep the mappings
    bool copies_ = false;                                        // by the kernel
    bool exposed_ = false;                                       // peers may be accessing the buffers of this rank
    bool accessing_ = false;                                     // this rank may be accessing those of its peers
};

}  // namespace ringcomm
