// Small all_reduce, reduce and all_gather: every rank stages all that it gives beside its start record, and every
// reader makes the result of what all have given; or the tree brings it.
#pragma once

#include "collectives/tree.h"

namespace ringcomm {

// Each rank gives so many bytes, and a reader gets `result_bytes`. combine(sources, result): of all ranks.
template <class Combine>
void one_shot(CollectiveOp& op, int reader, size_t given, size_t result_bytes, Combine combine) {
    const std::byte* const own = op.call.source;
    const auto stage = [&] {
        if (op.rank != reader) op.copy_in(op.staging(op.rank, 0, given), own, given);
    };
    if (!op.start(given, stage)) return;
    if (reader == ALL_RANKS && TreePass(op, given, result_bytes).run(combine)) return;
    const bool reads = includes(reader, op.rank);
    op.await_starts(reads ? given : 0);
    if (!reads) return;
    const void** sources = op.group.sources.data();
    for (int p = 0; p < op.size; ++p) sources[p] = p == op.rank ? own : op.staging(p, 0, given);
    combine(sources, op.call.target);
}

}  // namespace ringcomm
