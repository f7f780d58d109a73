// DirectAccess: the buffers of other ranks without staging.
#include "collectives/direct.h"

namespace ringcomm {

DirectAccess::~DirectAccess() {
    if (!exposed_ && accessing_) op_.group.end_peer_access();
    if (!exposed_ || op_.group.await_peer_access()) return;
    // A stopped peer may write there whenever it goes on. Symmetric buffers stay mapped until every rank has released
    // them.
    op_.group.world->heaps.retire(own_.target);
}

bool DirectAccess::negotiate(DirectNeeds needs) {
    const auto path = direct_path(op_, own_, needs);
    if (!path) return false;
    copies_ = *path == RC_PATH_CMA;
    op_.set_path(*path);
    accessing_ = true;
    op_.group.begin_peer_access();
    sources_.resize(op_.size);
    targets_.resize(op_.size);
    sources_[op_.rank] = resolve(0, own_.source);
    targets_[op_.rank] = resolve(0, own_.target);
    resolve(needs);
    return true;
}

bool DirectAccess::also_offered(DirectNeeds more) {
    if (!all_lend(op_, own_, more)) return false;
    resolve(more);
    return true;
}

void DirectAccess::copy_source(int r, size_t at, std::byte* to, size_t bytes) const {
    if (source(r)) return op_.copy_out(to, source(r) + at, bytes);
    op_.read(r, to, buffers(r).source + at, bytes);
}

void DirectAccess::finish() {
    op_.group.end_peer_access();
    // A rank that dies does not wait for those that read its private memory.
    if (copies_) op_.check();
    op_.publish_collected(1);
    for (int p = 0; p < op_.size; ++p) op_.await_collected(p, 1);
    exposed_ = accessing_ = false;
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
    if (location) return op_.group.resolve(location);
    return {std::shared_ptr<void>(), const_cast<std::byte*>(address)};  // which nobody here owns
}

}  // namespace ringcomm
