// How the path of a collective is chosen.
#include "collectives/path.h"

#include <algorithm>

namespace ringcomm {

namespace {

// Where a buffer lies in the file of the world, if direct access to it pays; else 0. A short block beside long ones is
// accessed as they are.
uint64_t locate(CollectiveOp& op, const std::byte* buffer, size_t bytes, size_t block) {
    if (!buffer || !bytes || std::max(bytes, block) < op.group.tuning().direct_bytes) return 0;
    return op.group.locate(buffer, bytes);
}

// How peers may access the private memory of this rank. `source_location`: 0, unless the source is not private.
Access private_access(const CollectiveOp& op, const DirectOffer& offer, uint64_t source_location) {
    const rc_tuning& tuning = op.group.tuning();
    if (!offer.block || !may_be_direct(tuning, offer.block)) return Access::NONE;
    const Access access = op.group.access();
    if (access == Access::LOAD && offer.block >= tuning.direct_bytes) return access;
    if (access == Access::NONE || !offer.copies) return Access::NONE;
    // The page in the middle of the buffer is taken for all.
    const Cma& cma = op.group.world->cma;
    const bool unread = source_location || !offer.source_bytes;
    const std::byte* middle = op.call.source + offer.source_bytes / 2;
    const bool pays = offer.block >= tuning.cma_bytes
                          ? unread || cma.readable(middle)
                          : offer.block >= tuning.cma_huge_bytes && (unread || cma.in_huge_page(middle));
    return pays ? Access::COPY : Access::NONE;
}

// Whether each of these ranks lets its peers access its buffer: by a location in the file, or as stated.
using Location = uint64_t DirectBuffers::*;
bool offers(const CollectiveOp& op, const DirectBuffers& own, int who, Location location, Access access) {
    for (int p = 0; p < op.size; ++p) {
        if (!includes(who, p)) continue;
        // Not from this rank's own record: the peers hold its lines.
        const bool mine = p == op.rank;
        if (!(mine ? offers_any(own) : op.wants_direct(p))) return false;
        const DirectBuffers& theirs = mine ? own : op.record(p).buffers;
        if (location && theirs.*location) continue;
        if (access == Access::NONE || theirs.access != access) return false;
    }
    return true;
}

bool offers(const CollectiveOp& op, const DirectBuffers& own, DirectNeeds needs, Access access) {
    return offers(op, own, needs.source, &DirectBuffers::source_location, access) &&
           offers(op, own, needs.target, &DirectBuffers::target_location, access);
}

}  // namespace

rc_path staged_path(const ShmGroup& group, const CallRecord& call) {
    if (group.size == 1) return RC_PATH_SINGLE;
    if ((call.collective != RC_ALL_REDUCE && call.collective != RC_REDUCE) || call.agrees_only) return RC_PATH_STAGED;
    const size_t most = std::min<size_t>(group.tuning().one_shot_bytes, group.arena().layout.staging_bytes);
    return call.bytes() <= most ? RC_PATH_ONE_SHOT : RC_PATH_TWO_STAGE;
}

bool may_be_direct(const rc_tuning& tuning, size_t block) {
    return block >= std::min({tuning.direct_bytes, tuning.cma_bytes, tuning.cma_huge_bytes});
}

DirectBuffers offered_buffers(CollectiveOp& op, const DirectOffer& offer) {
    const std::byte* source = op.call.source;
    const uint64_t source_location = locate(op, source, offer.source_bytes, offer.block);
    return {source_location, locate(op, op.call.target, offer.target_bytes, offer.block),
            private_access(op, offer, source_location), source, op.call.target};
}

std::optional<rc_path> direct_path(const CollectiveOp& op, const DirectBuffers& own, DirectNeeds needs) {
    if (offers(op, own, needs, Access::NONE)) return RC_PATH_SYMMETRIC;
    if (needs.target == NO_RANK && offers(op, own, ALL_RANKS, nullptr, Access::COPY)) return RC_PATH_CMA;
    if (offers(op, own, needs, Access::LOAD)) return RC_PATH_THREADS;
    return {};
}

bool all_lend(const CollectiveOp& op, const DirectBuffers& own, DirectNeeds more) {
    return offers(op, own, more, Access::LOAD);
}

}  // namespace ringcomm
