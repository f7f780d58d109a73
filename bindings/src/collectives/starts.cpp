// Which calls a rank starts without waiting, and whether the rest of one would wait.
#include "collectives/path.h"

namespace ringcomm {

int ShmGroup::awaited(const CallRecord& call) const {
    if (!is_one_way(call)) return ALL_RANKS;
    const bool from_root = collectives[call.collective].given_by == Ranks::ROOT;
    if (from_root == (rank == call.root)) return NO_RANK;  // this rank only gives
    return from_root ? call.root : ALL_RANKS;
}

// Reductions of this size take one synchronization, and blocks of it one chunk.
bool ShmGroup::is_one_way(const CallRecord& call) const {
    const Collective& row = collectives[call.collective];
    if (!row.rooted() || call.counts || call.agrees_only || size == 1) return false;
    const size_t given = call.bytes() * (row.given == Data::BLOCKS ? size : 1);
    return given <= std::min<size_t>(INLINE_BYTES, tuning().one_shot_bytes) &&
           size * round_up(call.bytes(), 64) <=
               std::min<size_t>(tuning().segment_bytes, arena().layout.staging_bytes) &&
           !may_be_direct(tuning(), call.elements(size) * call.item);
}

// What one chunk holds, and no rank takes from another's buffers. Where blocks of different lengths are given, each has
// room for the longest: chunk 0 is larger than the array then.
bool ShmGroup::can_start(const CallRecord& call) const {
    if (size == 1) return true;
    const bool known = !call.counts || collectives[call.collective].given != Data::BLOCKS;
    const size_t bytes = call.agrees_only ? 0 : call.elements(size) * call.item;
    const size_t most =
        std::min<size_t>({tuning().one_shot_bytes, tuning().segment_bytes, arena().layout.staging_bytes});
    const uint64_t next = mine().finished.load(std::memory_order_relaxed) + 1;
    const bool has_room = next <= verified + (bytes <= INLINE_BYTES ? run_ahead() : 1);
    return known && bytes <= most && !may_be_direct(tuning(), bytes) && has_room;
}

bool ShmGroup::has_arrived(const CallRecord& call) const {
    const auto start_of = [&](int p) -> const StartRecord& { return record(p, call.epoch); };
    const auto has_started = [&](int p) { return p == rank || observe(start_of(p).epoch) >= call.epoch; };
    const int needed = awaited(call);
    if (needed == NO_RANK) return true;
    // A mismatch names all ranks.
    if (needed >= 0 && has_started(needed) && start_of(needed).signature == call.signature) return true;
    for (int p = 0; p < size; ++p) {
        if (!has_started(p)) return false;
    }
    return true;
}

}  // namespace ringcomm
