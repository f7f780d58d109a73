// The fused collectives that are one exchange each, and the dispatch to all.
#include "core/collectives.h"
#include "collectives/exchange.h"
#include "collectives/tree.h"

namespace ringcomm {

namespace {

constexpr uint64_t REFRESH = uint64_t{1} << 32;  // calls

void barrier(CollectiveOp& op) {
    if (!op.start(0, [] {}) || TreePass(op, 0, 0).run([](auto, auto) {})) return;
    op.await_starts();
}

// What the root copies of a block between it and another rank, where both could: an n-th makes the shares of all ranks
// equal.
size_t root_part(const CollectiveOp& op, size_t bytes) { return bytes / op.size / 64 * 64; }

// scatter and broadcast: `block` is what a rank gets, and where it lies in the source of the root. The others read it,
// or they and the root share the work.
struct RootBlock {
    size_t offset, bytes;
};
template <class Block>
bool scatter_directly(CollectiveOp& op, DirectAccess& direct, Block block) {
    const int root = op.call.root;
    if (!direct.negotiate({root, NO_RANK})) return false;
    const RootBlock own = block(root), mine = block(op.rank);
    const DirectBuffers& buffers = direct.buffers(root);
    const bool root_is_idle = !own.bytes || buffers.target == buffers.source + own.offset;
    const bool shared = root_is_idle && direct.also_offered({NO_RANK, all_but(root)});
    for (int p = 0; p < op.size && shared && op.rank == root; ++p) {
        if (p == root) continue;
        const RootBlock theirs = block(p);
        op.copy_out(direct.target(p), op.call.source + theirs.offset, root_part(op, theirs.bytes));
    }
    const size_t done = shared ? root_part(op, mine.bytes) : 0;
    direct.copy_source(root, mine.offset + done, op.call.target + done, mine.bytes - done);
    return true;
}

void broadcast(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const size_t bytes = call.bytes();
    const Chunking chunking(op, 1);
    const bool is_root = op.rank == call.root;
    // Among more ranks all would read the memory of one at once: not measured.
    DirectAccess direct(op, {is_root ? bytes : 0, is_root ? 0 : bytes, bytes, op.size == 2});
    exchange(
        op, {call.root, ALL_RANKS}, direct, chunking.length(0, bytes), [&] { return chunking.chunks(bytes); },
        [&](uint64_t k) {
            const size_t length = chunking.length(k, bytes);
            op.copy_in(op.staging(op.rank, k, length), call.source + chunking.begin(k, bytes), length);
        },
        [&](uint64_t k) {
            if (is_root) return;
            const size_t length = chunking.length(k, bytes);
            op.copy_out(call.target + chunking.begin(k, bytes), op.staging(call.root, k, length), length);
        },
        [&] { return scatter_directly(op, direct, [&](int p) { return RootBlock{0, p == call.root ? 0 : bytes}; }); });
}

// Each rank writes its block into all targets, or reads all blocks.
bool all_gather_directly(CollectiveOp& op, DirectAccess& direct, const Blocks& blocks) {
    const CallRecord& call = op.call;
    const size_t mine = blocks.bytes(op.rank);
    const bool pushes = direct.negotiate({NO_RANK, ALL_RANKS});
    if (!pushes && !direct.negotiate({ALL_RANKS, NO_RANK})) return false;
    for (int i = 0; i < op.size; ++i) {
        const int p = (op.rank + i) % op.size;
        if (pushes) {
            op.copy_out(direct.target(p) + blocks.offset(op.rank), call.source, mine);
        } else {
            direct.copy_source(p, 0, call.target + blocks.offset(p), blocks.bytes(p));
        }
    }
    return true;
}

// Each rank writes its block into the target of the root, or the root reads all blocks, or they share the work.
bool gather_directly(CollectiveOp& op, DirectAccess& direct, const Blocks& blocks) {
    const CallRecord& call = op.call;
    const int root = call.root;
    const DirectNeeds target{NO_RANK, root}, sources{all_but(root), NO_RANK};
    const bool pushed = direct.negotiate(target);
    const bool pulled = pushed ? direct.also_offered(sources) : direct.negotiate(sources);
    if (!pushed && !pulled) return false;
    const DirectBuffers& buffers = direct.buffers(root);
    const bool root_is_idle = buffers.source == buffers.target + blocks.offset(root);
    const auto pulled_bytes = [&](int p) {
        if (!pushed || p == root) return blocks.bytes(p);
        return pulled && root_is_idle ? root_part(op, blocks.bytes(p)) : 0;
    };
    if (op.rank == root) {
        for (int p = 0; p < op.size; ++p) {
            direct.copy_source(p, 0, call.target + blocks.offset(p), pulled_bytes(p));
        }
    } else {
        const size_t done = pulled_bytes(op.rank), rest = blocks.bytes(op.rank) - done;
        if (rest) op.copy_out(direct.target(root) + blocks.offset(op.rank) + done, call.source + done, rest);
    }
    return true;
}

// Small blocks of many ranks, which the tree may bring.
void all_gather_one_shot(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const size_t block = call.bytes();
    const auto join = [&](const void** sources, std::byte* result) {
        for (int p = 0; p < op.size; ++p) memmove(result + p * block, sources[p], block);
    };
    if (!op.start(block, [&] { op.copy_in(op.staging(op.rank, 0, block), call.source, block); })) return;
    if (TreePass(op, block, op.size * block).run(join)) return;
    op.await_starts(block);
    const void** sources = op.group.sources.data();
    for (int p = 0; p < op.size; ++p) sources[p] = p == op.rank ? call.source : op.staging(p, 0, block);
    join(sources, call.target);
    op.set_path(RC_PATH_ONE_SHOT);
}

// gather and all_gather differ only in the readers.
void gather(CollectiveOp& op, int reader) {
    const CallRecord& call = op.call;
    const Blocks blocks(call);
    const size_t mine = blocks.bytes(op.rank), all = blocks.offset(op.size);
    const Chunking chunking(op, 1);
    DirectAccess direct(op, {mine, includes(reader, op.rank) ? all : 0, blocks.largest(op.size), true});
    exchange(
        op, {ALL_RANKS, reader}, direct, chunking.length(0, blocks.largest(op.size)),
        [&] { return chunking.chunks(blocks.largest(op.size)); },
        [&](uint64_t k) {
            const size_t length = chunking.length(k, mine);
            op.copy_in(op.staging(op.rank, k, length), call.source + chunking.begin(k, mine), length);
        },
        [&](uint64_t k) {
            for (int p = 0; p < op.size; ++p) {
                const size_t bytes = blocks.bytes(p), begin = chunking.begin(k, bytes),
                             length = chunking.length(k, bytes);
                const std::byte* source = p == op.rank ? call.source + begin : op.staging(p, k, length);
                op.copy_out(call.target + blocks.offset(p) + begin, source, length);
            }
        },
        [&] { return (reader == ALL_RANKS ? all_gather_directly : gather_directly)(op, direct, blocks); });
}

void scatter(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const Blocks blocks(call);
    const Chunking chunking(op, op.size);
    const Slots slots(op, chunking, blocks, blocks.largest(op.size));
    const size_t mine = blocks.bytes(op.rank);
    const size_t all = op.rank == call.root ? blocks.offset(op.size) : 0;
    DirectAccess direct(op, {all, mine, blocks.largest(op.size), true});
    exchange(
        op, {call.root, ALL_RANKS}, direct, slots.total, [&] { return chunking.chunks(blocks.largest(op.size)); },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            op.copy_out(call.target + chunking.begin(k, mine), slots.source(call.root, k), chunking.length(k, mine));
        },
        [&] {
            return scatter_directly(op, direct, [&](int p) { return RootBlock{blocks.offset(p), blocks.bytes(p)}; });
        });
}

void all_to_all(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const int n = op.size, me = op.rank;
    const Blocks sent(call), received(call, call.counts ? call.counts + n : nullptr);
    // The longest block of any pair determines the number of chunks. It is known only after await_starts(), so chunk 0
    // is staged in slots of full size.
    const Chunking chunking(op, n);
    const bool uneven = call.counts != nullptr;
    const Slots slots(op, chunking, sent, uneven ? chunking.piece : call.bytes());
    const bool in_place = call.source == call.target;
    // In place, a block would be overwritten before its reader has copied it.
    DirectAccess direct(
        op, {in_place ? 0 : sent.offset(n), in_place ? 0 : received.offset(n), in_place ? 0 : sent.largest(n), true});
    exchange(
        op, {ALL_RANKS, ALL_RANKS}, direct, slots.total,
        [&] {
            size_t longest = call.bytes();
            for (int p = 0; uneven && p < n; ++p) {
                longest = std::max(longest, Blocks(call, op.group.arena().counts(p, call.epoch)).largest(n));
            }
            return chunking.chunks(longest);
        },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            for (int p = 0; p < n; ++p) {
                const size_t bytes = received.bytes(p);
                op.copy_out(call.target + received.offset(p) + chunking.begin(k, bytes), slots.source(p, k),
                            chunking.length(k, bytes));
            }
        },
        [&] {
            const bool pushes = direct.negotiate({NO_RANK, ALL_RANKS});
            if (!pushes && !direct.negotiate({ALL_RANKS, NO_RANK})) return false;
            for (int i = 0; i < n; ++i) {
                const int p = (me + i) % n;
                const uint64_t* counts = uneven ? op.group.arena().counts(p, call.epoch) : nullptr;
                if (pushes) {
                    const size_t at = Blocks(call, counts ? counts + n : nullptr).offset(me);
                    op.copy_out(direct.target(p) + at, call.source + sent.offset(p), sent.bytes(p));
                } else {
                    const size_t at = Blocks(call, counts).offset(me);
                    direct.copy_source(p, at, call.target + received.offset(p), received.bytes(p));
                }
            }
            return true;
        });
}

void reduce_scatter(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const int n = op.size, me = op.rank;
    const Blocks blocks(call);
    const Chunking chunking(op, n);
    const Slots slots(op, chunking, blocks, blocks.largest(n));
    const size_t mine = blocks.bytes(me);
    const void** sources = op.group.sources.data();
    DirectAccess direct(op, {blocks.offset(n), 0, blocks.largest(n)});
    exchange(
        op, {ALL_RANKS, ALL_RANKS}, direct, slots.total, [&] { return chunking.chunks(blocks.largest(n)); },
        [&](uint64_t k) { slots.stage(k); },
        [&](uint64_t k) {
            for (int p = 0; p < n; ++p) sources[p] = slots.source(p, k);
            reduce_blocks(call, call.target + chunking.begin(k, mine), sources, n,
                          chunking.length(k, mine) / call.item);
        },
        [&] {
            if (!direct.negotiate({ALL_RANKS, NO_RANK})) return false;
            for (int p = 0; p < n; ++p) sources[p] = direct.source(p) + blocks.offset(me);
            reduce_blocks(call, call.target, sources, n, mine / call.item);
            return true;
        });
}

// A group of one rank.
void run_single(const CollectiveOp& op) {
    const CallRecord& call = op.call;
    const void* source = call.source;
    const size_t all = Blocks(call).bytes(0);
    if (call.collective == RC_ALL_TO_ALL && call.counts && call.counts[0] != call.counts[1]) {
        throw Failure(RC_MISMATCH,
                      format("rank 0 sends %zu elements to itself, but expects %zu", size_t(call.counts[0]),
                             size_t(call.counts[1])),
                      0);
    }
    if (collectives[call.collective].reduces) return reduce_blocks(call, call.target, &source, 1, all / call.item);
    op.copy_out(call.target, call.source, all);
}

void run(CollectiveOp& op) {
    const CallRecord& call = op.call;
    const rc_path path = staged_path(op.group, call);
    op.set_path(path);
    if (path == RC_PATH_SINGLE) return op.part == Part::START || call.agrees_only ? void() : run_single(op);
    if (call.agrees_only) return barrier(op);  // compares the calls
    const auto reduce_to = path == RC_PATH_ONE_SHOT ? reduce_one_shot : reduce_in_two_stages;
    switch (collectives[call.collective].moves_as) {
        case RC_BARRIER: return barrier(op);
        case RC_BROADCAST: return broadcast(op);
        case RC_REDUCE: return reduce_to(op, call.root);
        case RC_ALL_REDUCE: return reduce_to(op, ALL_RANKS);
        case RC_GATHER: return gather(op, call.root);
        case RC_SCATTER: return scatter(op);
        case RC_ALL_GATHER: return TreePass::fits(op.group, call) ? all_gather_one_shot(op) : gather(op, ALL_RANKS);
        case RC_REDUCE_SCATTER: return reduce_scatter(op);
        case RC_ALL_TO_ALL: return all_to_all(op);
        default: throw Failure(RC_SYSTEM, format("%s has no implementation", call_name(call.collective)), op.rank);
    }
}

}  // namespace

void ShmGroup::run_collective(const CallRecord& call) {
    CollectiveOp op(*this, call, call.started ? Part::REST : Part::WHOLE);
    if (call.epoch % REFRESH == 0) op.refresh_flags();
    const auto finish = [&] { mine().finished.store(call.epoch, std::memory_order_release); };
    try {
        run(op);
    } catch (const Failure& failure) {
        // Otherwise the call is not finished: this rank still owes data to its peers.
        if (failure.error.code == RC_MISMATCH || failure.error.code == RC_ARGUMENT) finish();
        throw;
    }
    finish();
}

void ShmGroup::start_collective(const CallRecord& call) {
    CollectiveOp op(*this, call, Part::START);
    run(op);
}

void ShmGroup::confirm(uint64_t epoch, double timeout) {
    if (size == 1 || epoch == 0) return;
    CallRecord call{};
    call.epoch = epoch;
    call.start = tick_ns();
    call.timeout = timeout;
    call.signature = signature_in(record(rank, epoch));
    call.collective = call_of(call.signature.word);
    CollectiveOp(*this, call, Part::REST).confirm();
}

}  // namespace ringcomm
