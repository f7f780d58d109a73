// DirectAccess: the buffers of other ranks without staging.
#include "collectives/direct.h"

namespace ringcomm {

DirectAccess::DirectAccess(CollectiveOp& op, const DirectOffer& offer) : op_(op) {
    const CallRecord& call = op.call;
    const size_t least = std::max<size_t>(1, op.comm.tuning().direct_bytes);
    if (call.source && offer.source_bytes >= least) {
        own_.source_location = op.comm.regions.locate(call.source, offer.source_bytes);
    }
    if (call.target && offer.target_bytes >= least) {
        own_.target_location = op.comm.regions.locate(call.target, offer.target_bytes);
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
    const std::byte* middle = op_.call.source + offer.source_bytes / 2;
    const bool pays = offer.block >= tuning.cma_bytes
                          ? !offer.source_bytes || cma.readable(middle)
                          : offer.block >= tuning.cma_huge_bytes && (!offer.source_bytes || cma.in_huge_page(middle));
    return pays ? Access::COPY : Access::NONE;
}

DirectAccess::~DirectAccess() {
    if (exposed_) op_.comm.await_peer_access();
}

void DirectAccess::publish_start() {
    exposed_ = own_.access == Access::LOAD;
    op_.publish_start(wanted() ? &own_ : nullptr);
}

bool DirectAccess::negotiate(DirectNeeds needs) {
    const uint64_t source = common_location(needs.source, &DirectBuffers::source_location),
                   target = common_location(needs.target, &DirectBuffers::target_location);
    if ((needs.source == NO_RANK || source) && (needs.target == NO_RANK || target)) {
        if (source) source_ = op_.comm.regions.find(source_location_ = source);
        if (target) target_ = op_.comm.regions.find(target_location_ = target);
        op_.set_path(RC_PATH_SYMMETRIC);
        return true;
    }
    const Access access = common_access();
    if (access == Access::NONE || (access == Access::COPY && needs.target != NO_RANK)) return false;
    access_ = access;
    op_.set_path(access == Access::LOAD ? RC_PATH_THREADS : RC_PATH_CMA);
    if (access == Access::LOAD) op_.comm.begin_peer_access();
    return true;
}

void DirectAccess::copy_source(int r, size_t at, std::byte* to, size_t bytes) const {
    if (access_ == Access::COPY && r != op_.rank)
        op_.read(r, to, buffers(r).source + at, bytes);
    else
        copy_block(to, source(r) + at, bytes);
}

void DirectAccess::finish() {
    if (access_ == Access::LOAD) op_.comm.end_peer_access();
    // A failed rank does not wait for its readers: data read since then is undefined.
    if (access_ == Access::COPY) op_.check();
    op_.publish_collected(1);
    for (int p = 0; p < op_.size; ++p) op_.await_collected(p, 1);
    exposed_ = false;
}

uint64_t DirectAccess::common_location(int who, uint64_t DirectBuffers::* location) const {
    if (who == NO_RANK) return 0;
    uint64_t value = 0;
    for (int p = 0; p < op_.size; ++p) {
        if (!includes(who, p)) continue;
        if (!wants_direct(p) || !(buffers(p).*location)) return 0;
        if (value && buffers(p).*location != value) return 0;
        value = buffers(p).*location;
    }
    return value;
}

Access DirectAccess::common_access() const {
    for (int p = 0; p < op_.size; ++p) {
        if (!wants_direct(p) || buffers(p).access != own_.access) return Access::NONE;
    }
    return own_.access;
}

}  // namespace ringcomm
