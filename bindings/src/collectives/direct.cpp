// DirectAccess: the buffers of other ranks without staging.
#include "collectives/direct.h"

namespace ringcomm {

DirectAccess::DirectAccess(CollectiveOp& op, const DirectOffer& offer) : op_(op) {
    const CallRecord& call = op.call;
    const size_t least = std::max<size_t>(1, op.comm.tuning().direct_bytes);
    if (call.source && offer.source_bytes >= least) {
        own_.source_location = op.comm.locate(call.source, offer.source_bytes);
    }
    if (call.target && offer.target_bytes >= least) {
        own_.target_location = op.comm.locate(call.target, offer.target_bytes);
    }
    own_.access = offered(offer);
    own_.source = call.source;
    own_.target = call.target;
}

Access DirectAccess::offered(const DirectOffer& offer) const {
    const rc_tuning& tuning = op_.comm.tuning();
    if (!offer.block || offer.block < std::min({tuning.direct_bytes, tuning.cma_bytes, tuning.cma_huge_bytes})) {
        return Access::NONE;
    }
    const Access access = op_.comm.access();
    if (access == Access::LOAD && offer.block >= tuning.direct_bytes) return access;
    if (access == Access::NONE || !offer.copies) return Access::NONE;
    // The page in the middle of the buffer is taken for all.
    const Cma& cma = op_.comm.world->cma;
    const bool unread = own_.source_location || !offer.source_bytes;
    const std::byte* middle = op_.call.source + offer.source_bytes / 2;
    const bool pays = offer.block >= tuning.cma_bytes
                          ? unread || cma.readable(middle)
                          : offer.block >= tuning.cma_huge_bytes && (unread || cma.in_huge_page(middle));
    return pays ? Access::COPY : Access::NONE;
}

DirectAccess::~DirectAccess() {
    if (exposed_) op_.comm.await_peer_access();
}

void DirectAccess::publish_start() {
    exposed_ = wanted();
    op_.publish_start(wanted() ? &own_ : nullptr);
}

bool DirectAccess::negotiate(DirectNeeds needs) {
    const auto reaches = [&](Access access) {
        return all_offer(needs.source, &DirectBuffers::source_location, access) &&
               all_offer(needs.target, &DirectBuffers::target_location, access);
    };
    rc_path path = RC_PATH_SYMMETRIC;
    if (!reaches(Access::NONE)) {
        copies_ = needs.target == NO_RANK && all_offer(ALL_RANKS, nullptr, Access::COPY);
        if (!copies_ && !reaches(Access::LOAD)) return false;
        path = copies_ ? RC_PATH_CMA : RC_PATH_THREADS;
    }
    op_.set_path(path);
    op_.comm.begin_peer_access();
    sources_.resize(op_.size);
    targets_.resize(op_.size);
    for (int p = 0; p < op_.size; ++p) {
        const DirectBuffers& theirs = buffers(p);
        if (includes(needs.source, p)) sources_[p] = resolve(p, theirs.source_location, theirs.source);
        if (includes(needs.target, p)) targets_[p] = resolve(p, theirs.target_location, theirs.target);
    }
    return true;
}

void DirectAccess::copy_source(int r, size_t at, std::byte* to, size_t bytes) const {
    if (source(r)) return copy_block(to, source(r) + at, bytes);
    op_.read(r, to, buffers(r).source + at, bytes);
}

void DirectAccess::finish() {
    op_.comm.end_peer_access();
    // The owner of a private buffer that fails or dies may release it meanwhile: what was read then is undefined.
    if (copies_) op_.check();
    op_.publish_collected(1);
    for (int p = 0; p < op_.size; ++p) op_.await_collected(p, 1);
    exposed_ = false;
}

// Whether each of these ranks lets its peers access its buffer: by a location in the file, or as stated.
bool DirectAccess::all_offer(int who, Location location, Access access) const {
    for (int p = 0; p < op_.size; ++p) {
        if (!includes(who, p)) continue;
        if (!wants_direct(p)) return false;
        const DirectBuffers& theirs = buffers(p);
        if (location && theirs.*location) continue;
        if (access == Access::NONE || theirs.access != access) return false;
    }
    return true;
}

std::shared_ptr<std::byte> DirectAccess::resolve(int r, uint64_t location, const std::byte* address) const {
    if (r != op_.rank && location) return op_.comm.resolve(location);
    if (r != op_.rank && copies_) return nullptr;
    return {std::shared_ptr<void>(), const_cast<std::byte*>(address)};  // which nobody here owns
}

}  // namespace ringcomm
