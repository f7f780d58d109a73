// How a MessageLink notices that a peer is lost: a call of the library fails, or the library reports it, as UCX does of
// a process that has ended. MPI as a rule ends the whole job.
#include "link/message_link.h"

namespace ringcomm {

void MessageLink::lose_peers() {
    for (const auto& [peer, status] : library_->lost_peers()) lose(peer, status);
}

// -1: any peer. MPI does not say what still works after an error.
void MessageLink::lose(int peer, int status) {
    for (int p = 0; p < size; ++p) {
        if (p == rank || peers_[p].lost || (peer >= 0 && p != peer)) continue;
        peers_[p].lost = peers_[p].left = true;
        peers_[p].failure = library_->describe(status);
        lost_.push_back(p);
    }
}

}  // namespace ringcomm
