// Serving all peers side by side.
#pragma once

#include "call.cuh"

namespace ringcomm::cuda {

// Calls serve(part, peer) for every peer, on warps of its own if there are enough: one after another, the first access
// to memory of each would wait for that of the peer before. `part` is that part of the block; it has no barrier.
template <class Serve>
RC_DEVICE void for_each_peer(const Call& call, Serve serve) {
    const Ctx& ctx = call.ctx;
    const int peers = call.n - 1, warps = ctx.threads / WARP;
    if (!peers) return;
    const int groups = peers < warps ? peers : warps, each = warps / groups * WARP, group = ctx.thread / each;
    Ctx part = ctx;
    part.thread = ctx.thread % each;
    part.threads = each;
    RC_NO_UNROLL for (int d = 1 + group; group < groups && d < call.n; d += groups) serve(part, (call.me + d) % call.n);
}

// Calls visit(peer) for every peer, each in a thread of its own, as long as there are so many.
template <class Visit>
RC_DEVICE void in_a_thread_each(const Call& call, Visit visit) {
    for (int p = call.ctx.thread; p < call.n; p += call.ctx.threads)
        if (p != call.me) visit(p);
}

}  // namespace ringcomm::cuda
