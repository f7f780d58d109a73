// How the survivors of a group agree on who they are.
//
// Each rank publishes that it takes part, and waits until every other one does so too, or has ended. The lowest of them
// writes the list of the survivors, and one compare-and-swap makes it the decision: all ranks read the same
// list, however many die meanwhile. A rank that is too late finds itself left out.
#pragma once

#include "shm/group.h"

namespace ringcomm {

struct Survivors {
    std::vector<int> ranks;  // ascending
    uint64_t offset;         // of an arena for them
};

// Waits for ranks that run but do not take part until `deadline`. Throws RC_ABORTED if this rank is left out.
Survivors agree_on_survivors(ShmGroup& group, uint64_t deadline);

}  // namespace ringcomm
