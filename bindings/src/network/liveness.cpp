// How a group of several hosts notices that a rank is lost: on this host by its process (shm/liveness.cpp), elsewhere
// by the link (link/socket_liveness.cpp, link/message_liveness.cpp).
#include "network/group.h"

namespace ringcomm {

void NetworkWorld::peer_lost(int process, const std::string& reason) {
    if (!lost_[process]) lost_[process] = reason;
}

std::string NetworkGroup::how_it_died(int r) {
    const int here = layout.local_rank_of(r);
    const bool left = closed(r) || (here >= 0 && local.group && local.group->closed(here));
    return left ? "" : how_it_ended(r);
}

std::string NetworkGroup::how_it_ended(int r) {
    const int here = layout.local_rank_of(r);
    const std::string how = here >= 0 && local.group ? local.group->how_it_ended(here) : "";
    if (!how.empty()) return how;
    const std::lock_guard lock(world->mutex);
    const std::string* reason = world->lost(members_[r]);
    return reason ? "was lost (" + *reason + ")" : "";
}

}  // namespace ringcomm
