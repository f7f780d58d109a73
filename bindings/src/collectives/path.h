// The path of a collective over shared memory: chosen here, by the rules in docs/shm.md (*Paths*), and carried out in
// collectives.cpp (single, direct paths), reduce.cpp (one-shot, two-stage, direct paths) and exchange.h (staged).
//
// A rank first takes the path over the staging buffers that follows from what all ranks know, the call and the
// settings: they agree on it without a word. A rank whose buffers are worth it offers them in its start record. After
// the start records all ranks know all offers, so they find the same direct path, or none.
#pragma once

#include <optional>

#include "collectives/collective_op.h"

namespace ringcomm {

rc_path staged_path(const ShmGroup& group, const CallRecord& call);

// Whether a rank may offer its buffers in a call in which one rank takes at most so many bytes from another.
bool may_be_direct(const rc_tuning& tuning, size_t block);

// What a rank may let its peers access.
struct DirectOffer {
    size_t source_bytes, target_bytes;  // of this rank's buffers that peers may read and write
    size_t block;                       // most that one rank takes from another; 0: symmetric buffers only
    bool copies = false;                // CMA copies of source blocks pay off
};
// Those of this rank's buffers that are worth it.
DirectBuffers offered_buffers(CollectiveOp& op, const DirectOffer& offer);

// The ranks whose sources a direct path reads, and whose targets it writes.
struct DirectNeeds {
    int source, target;
};
// Of start records that have come, given what this rank has offered: the direct path of a call with these needs, if all
// ranks offer them; and whether they offer more, for this rank to load and store.
std::optional<rc_path> direct_path(const CollectiveOp& op, const DirectBuffers& own, DirectNeeds needs);
bool all_lend(const CollectiveOp& op, const DirectBuffers& own, DirectNeeds more);

// Whether a rank wants direct access: then it stages nothing before the start records.
inline bool offers_any(const DirectBuffers& buffers) {
    return buffers.source_location || buffers.target_location || buffers.access != Access::NONE;
}

}  // namespace ringcomm
