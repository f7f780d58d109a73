// How a group of several hosts notices that a rank is lost: on this host by its process (shm/liveness.cpp), elsewhere
// by the link (link/socket_liveness.cpp, link/message_liveness.cpp).
#include <algorithm>

#include "network/group.h"

namespace ringcomm {

void NetworkWorld::peer_lost(int process, const std::string& reason) {
    has_lost_ = true;
    if (!lost_[process]) lost_[process] = reason;
}

std::string NetworkGroup::how_it_died(int r) { return closed(r) ? "" : how_it_ended(r); }

std::string NetworkGroup::how_it_ended(int r) {
    if (const int here = shares_memory(r); here >= 0) return local.group->how_it_ended(here);
    const std::lock_guard lock(world->mutex);
    const std::string* reason = world->lost(members_[r]);
    if (reason) return "was lost (" + *reason + ")";
    // A rank that is not connected may be lost with another one of its host.
    if (world->has_lost() && has_lost_rank(layout.host_of(r))) world->link->connect(members_[r]);
    return "";
}

bool NetworkGroup::has_lost_rank(int host) const {
    const auto is_lost = [&](int r) { return !closed(r) && world->lost(members_[r]); };
    return std::ranges::any_of(layout.ranks[host], is_lost);
}

}  // namespace ringcomm
