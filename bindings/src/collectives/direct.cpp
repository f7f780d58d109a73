// DirectAccess: the buffers of other ranks without staging.
#include "collectives/direct.h"

namespace ringcomm {

DirectAccess::DirectAccess(CollectiveOp& op, const DirectOffer& offer) : op_(op) {
    own_.source = op.call.source;
    own_.target = op.call.target;
    own_.source_location = locate(own_.source, offer.source_bytes, offer);
    own_.target_location = locate(own_.target, offer.target_bytes, offer);
    own_.access = offered(offer);
}

// A short block beside long ones is accessed as they are.
uint64_t DirectAccess::locate(const std::byte* buffer, size_t bytes, const DirectOffer& offer) const {
    if (!buffer || !bytes || std::max(bytes, offer.block) < op_.comm.tuning().direct_bytes) return 0;
    return op_.comm.locate(buffer, bytes);
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
    if (!exposed_ && accessing_) op_.comm.end_peer_access();
    if (!exposed_ || op_.comm.await_peer_access()) return;
    // A stopped peer may write there whenever it goes on. Regions stay mapped until every rank has released them.
    op_.comm.world->heaps.retire(own_.target);
}

bool DirectAccess::negotiate(DirectNeeds needs) {
    rc_path path = RC_PATH_SYMMETRIC;
    if (!offers(needs, Access::NONE)) {
        copies_ = needs.target == NO_RANK && offers(ALL_RANKS, nullptr, Access::COPY);
        if (!copies_ && !offers(needs, Access::LOAD)) return false;
        path = copies_ ? RC_PATH_CMA : RC_PATH_THREADS;
    }
    op_.set_path(path);
    accessing_ = true;
    op_.comm.begin_peer_access();
    sources_.resize(op_.size);
    targets_.resize(op_.size);
    sources_[op_.rank] = resolve(0, own_.source);
    targets_[op_.rank] = resolve(0, own_.target);
    resolve(needs);
    return true;
}

bool DirectAccess::also(DirectNeeds more) {
    if (!offers(more, Access::LOAD)) return false;
    resolve(more);
    return true;
}

void DirectAccess::copy_source(int r, size_t at, std::byte* to, size_t bytes) const {
    if (source(r)) return op_.copy_out(to, source(r) + at, bytes);
    op_.read(r, to, buffers(r).source + at, bytes);
}

void DirectAccess::finish() {
    op_.comm.end_peer_access();
    // A rank that dies does not wait for those that read its private memory.
    if (copies_) op_.check();
    op_.publish_collected(1);
    for (int p = 0; p < op_.size; ++p) op_.await_collected(p, 1);
    exposed_ = accessing_ = false;
}

// Whether each of these ranks lets its peers access its buffer: by a location in the file, or as stated.
bool DirectAccess::offers(int who, Location location, Access access) const {
    for (int p = 0; p < op_.size; ++p) {
        if (!includes(who, p)) continue;
        if (!wants_direct(p)) return false;
        if (location && buffers(p).*location) continue;
        if (access == Access::NONE || buffers(p).access != access) return false;
    }
    return true;
}

bool DirectAccess::offers(DirectNeeds needs, Access access) const {
    return offers(needs.source, &DirectBuffers::source_location, access) &&
           offers(needs.target, &DirectBuffers::target_location, access);
}

void DirectAccess::resolve(DirectNeeds needs) {
    for (int p = 0; p < op_.size; ++p) {
        if (p == op_.rank) continue;
        const DirectBuffers& theirs = buffers(p);
        if (includes(needs.source, p)) {
            sources_[p] = resolve(theirs.source_location, copies_ ? nullptr : theirs.source);
        }
        if (includes(needs.target, p)) targets_[p] = resolve(theirs.target_location, theirs.target);
    }
}

std::shared_ptr<std::byte> DirectAccess::resolve(uint64_t location, const std::byte* address) const {
    if (location) return op_.comm.resolve(location);
    return {std::shared_ptr<void>(), const_cast<std::byte*>(address)};  // which nobody here owns
}

}  // namespace ringcomm
