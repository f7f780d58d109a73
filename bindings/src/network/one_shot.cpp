// A small collective between hosts: every host has the data of all hosts, and each rank takes or reduces its result.
#include "network/call.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

constexpr size_t ONE_SHOT_BYTES = 8 << 10;    // of a host
constexpr size_t ONE_SHOT_PACKET = 32 << 10;  // of all hosts

}  // namespace

// What rank r gives, in bytes.
size_t NetworkCall::given_bytes(int r) const {
    if (!row_.gives(r, call.root)) return 0;
    switch (row_.given) {
        case Data::NOTHING: return 0;
        case Data::ARRAY: return call.bytes();
        case Data::BLOCK: return blocks_.bytes(r);
        case Data::BLOCKS: return blocks_.offset(size);
    }
    return 0;
}

uint64_t NetworkCall::result_count() const {
    if (!row_.gets(rank, call.root)) return 0;
    return (row_.got == Data::BLOCK ? blocks_.bytes(rank) : call.bytes()) / call.item;
}

// All ranks decide alike, because it follows from what they agree on.
bool NetworkCall::fits_one_shot() const {
    if (row_.exchanges() && call.counts) return false;  // each rank knows only its own counts
    const bool one_rank_per_host = group_.layout.largest() == 1;
    // Of a host, so that a packet holds the records of all hosts even where each calls something else.
    const size_t most = std::min(ONE_SHOT_BYTES, ONE_SHOT_PACKET / group_.layout.hosts());
    for (const std::vector<int>& ranks : group_.layout.ranks) {
        size_t host = 0;
        for (const int r : ranks) {
            const size_t given = given_bytes(r);
            if (!one_rank_per_host && given > SLOT_BYTES) return false;
            host = row_.reduces ? std::max(host, given) : host + given;
        }
        if (host > most) return false;
    }
    return true;
}

void NetworkCall::give(std::byte* payload) const {
    const size_t bytes = given_bytes(rank);
    if (bytes == 0) return;
    if (row_.reduces && call.op == RC_PREMUL_SUM) {
        const void* source = call.source;
        return kernels().reduce[call.dtype][RC_PREMUL_SUM](payload, &source, 1, bytes / call.item, call.factor);
    }
    copy_block(payload, call.source, bytes);
}

void NetworkCall::finish_one_shot() const {
    const int me = rank;
    const HostLayout& layout = group_.layout;
    set_path(RC_PATH_ONE_SHOT);
    if (row_.got == Data::NOTHING || !row_.gets(me, call.root)) return;
    const auto payload = [&](int host) { return records_[host].payload().data(); };
    if (row_.reduces) {
        const size_t at = row_.got == Data::BLOCK ? blocks_.offset(me) : 0;
        std::vector<const void*> sources;
        for (int host = 0; host < layout.hosts(); ++host) sources.push_back(payload(host) + at);
        combine(call.target, sources, result_count());
        if (call.op == RC_AVG) divide(call.target, result_count());
        return;
    }
    if (row_.given == Data::ARRAY) {
        if (me != call.root) copy_block(call.target, payload(layout.host_of(call.root)), call.bytes());
        return;
    }
    if (row_.given == Data::BLOCKS && row_.given_by == Ranks::ROOT) {
        copy_block(call.target, payload(layout.host_of(call.root)) + blocks_.offset(me), blocks_.bytes(me));
        return;
    }
    for (int host = 0; host < layout.hosts(); ++host) {
        const std::byte* from = payload(host);
        for (const int r : layout.ranks[host]) {
            const size_t bytes = blocks_.bytes(r), row = row_.given == Data::BLOCKS ? blocks_.offset(size) : bytes;
            const std::byte* block = row_.given == Data::BLOCKS ? from + blocks_.offset(me) : from;
            copy_block(call.target + blocks_.offset(r), block, bytes);
            from += row;
        }
    }
}

}  // namespace ringcomm
