#include "direct.h"

namespace ringcomm {

Direct::Direct(Round& round, const Offer& offer) : round_(round) {
    const Call& call = round.call;
    const size_t least = std::max<size_t>(1, round.comm.tuning().direct_bytes);
    if (call.source && offer.source_bytes >= least) {
        mine_.source_key = round.comm.regions.key(call.source, offer.source_bytes);
    }
    if (call.target && offer.target_bytes >= least) {
        mine_.target_key = round.comm.regions.key(call.target, offer.target_bytes);
    }
    mine_.access = offered(offer);
    mine_.source = call.source;
    mine_.target = call.target;
}

Access Direct::offered(const Offer& offer) const {
    const rc_tuning& tuning = round_.comm.tuning();
    if (!offer.block || offer.block < std::min({tuning.direct_bytes, tuning.reach_bytes, tuning.reach_huge_bytes})) {
        return Access::NONE;
    }
    const Access access = round_.comm.access();
    if (access == Access::LOAD && offer.block >= tuning.direct_bytes) return access;
    if (access == Access::NONE || !offer.copies) return Access::NONE;
    // The page in the middle of the buffer speaks for all.
    const Reach& reach = round_.comm.world->reach;
    const std::byte* middle = round_.call.source + offer.source_bytes / 2;
    const bool pays = offer.block >= tuning.reach_bytes
                          ? !offer.source_bytes || reach.copies(middle)
                          : offer.block >= tuning.reach_huge_bytes && (!offer.source_bytes || reach.huge(middle));
    return pays ? Access::COPY : Access::NONE;
}

Direct::~Direct() {
    if (exposed_) round_.comm.await_intruders();
}

void Direct::start() {
    exposed_ = mine_.access == Access::LOAD;
    round_.start(hope() ? &mine_ : nullptr);
}

bool Direct::agreed(Needs needs) {
    const uint64_t source = common(needs.source, &Places::source_key),
                   target = common(needs.target, &Places::target_key);
    if ((needs.source == NO_ONE || source) && (needs.target == NO_ONE || target)) {
        if (source) source_ = round_.comm.regions.holder(source_key_ = source);
        if (target) target_ = round_.comm.regions.holder(target_key_ = target);
        round_.goes(RC_SYMMETRIC);
        return true;
    }
    const Access access = common_access();
    if (access == Access::NONE || (access == Access::COPY && needs.target != NO_ONE)) return false;
    access_ = access;
    round_.goes(access == Access::LOAD ? RC_THREADS : RC_REACHED);
    if (access == Access::LOAD) round_.comm.intrude();
    return true;
}

void Direct::copy_source(int r, size_t at, std::byte* to, size_t bytes) const {
    if (access_ == Access::COPY && r != round_.rank)
        round_.read(r, to, places(r).source + at, bytes);
    else
        copy_block(to, source(r) + at, bytes);
}

void Direct::finish() {
    if (access_ == Access::LOAD) round_.comm.withdraw();
    // A rank that has failed does not wait for those who read its memory: what was read since may be anything.
    if (access_ == Access::COPY) round_.check();
    round_.collected(1);
    for (int p = 0; p < round_.size; ++p) round_.await_collected(p, 1);
    exposed_ = false;
}

uint64_t Direct::common(int who, uint64_t Places::* key) const {
    if (who == NO_ONE) return 0;
    uint64_t value = 0;
    for (int p = 0; p < round_.size; ++p) {
        if (!is(who, p)) continue;
        if (!hopes(p) || !(places(p).*key)) return 0;
        if (value && places(p).*key != value) return 0;
        value = places(p).*key;
    }
    return value;
}

Access Direct::common_access() const {
    for (int p = 0; p < round_.size; ++p) {
        if (!hopes(p) || places(p).access != mine_.access) return Access::NONE;
    }
    return mine_.access;
}

}  // namespace ringcomm
