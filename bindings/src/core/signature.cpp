// Signatures: packed, and described.
#include "core/signature.h"

#include <cinttypes>
#include <iterator>

#include "core/call_record.h"
#include "core/collectives.h"
#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

// Which facts of a call its description needs.
struct Described {
    const char* name;
    bool arrays = false, blocks = false;
    bool reduces = false;
    const char* root = nullptr;  // how the root is called, nullptr if there is none
    bool at_most = false;        // so many bytes, of any dtype
};

constexpr Described described(const Collective& row) {
    const bool arrays = row.given != Data::NOTHING;
    return {row.name, arrays, arrays && row.given != Data::ARRAY, row.reduces, row.rooted() ? "root" : nullptr};
}

constexpr Described call_names[] = {
#define COLLECTIVE_ROW(name, NAME, ...) described(collectives[RC_##NAME]),
#include "ringcomm/types.def"
    {"send", true, false, false, "to"},
    {"recv", true, false, false, "from"},
    {"recv", true, false, false, "from", true},
    {"probe", false, false, false, "from"},
    {"recv", false, false, false, "from"},  // of any length
    {"shrink"},
    {"grow"},
};
static_assert(std::size(call_names) == CALLS);

// The bits of a signature; the highest is SIGNATURE_DIRECT.
struct BitField {
    int shift, bits;

    constexpr uint64_t mask() const { return (uint64_t{1} << bits) - 1; }
    constexpr uint64_t put(int value) const { return (uint64_t(value) & mask()) << shift; }
    constexpr int get(uint64_t word) const { return int(word >> shift & mask()); }
};

uint64_t mix(uint64_t hash, uint64_t value) {  // the finaliser of SplitMix64 over a running sum
    hash += value + 0x9e3779b97f4a7c15;
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111eb;
    return hash ^ hash >> 31;
}

constexpr BitField CALL{0, 8}, DTYPE{8, 8}, OP{16, 8}, COUNTS{24, 1}, ON_GPUS{25, 1}, ROOT{32, 24};

}  // namespace

const char* call_name(int call) { return call_names[call].name; }

int call_of(uint64_t signature) { return CALL.get(signature); }

uint64_t signature_of(int call, int dtype, int op, int root, bool counts) {
    const Described& of = call_names[call];
    uint64_t word = CALL.put(call) | COUNTS.put(counts);
    if (of.arrays) word |= DTYPE.put(dtype);
    if (of.reduces) word |= OP.put(op);
    if (of.root) word |= ROOT.put(root + 1);  // 0: any
    return word;
}

Signature signature_of(const CallRecord& call, int size) {
    const uint64_t word = signature_of(call.collective, call.dtype, call.op, call.root, call.counts != nullptr) |
                          ON_GPUS.put(call.agrees_only);
    Signature signature{word, call.count, call.op == RC_PREMUL_SUM ? std::bit_cast<uint64_t>(call.factor) : 0};
    if (!call.counts) return signature;
    signature.count = 0;
    if (collectives[call.collective].exchanges()) return signature;  // a count per pair of ranks
    for (int p = 0; p < size; ++p) {
        signature.count += call.counts[p];
        signature.extra = mix(signature.extra, call.counts[p]);
    }
    return signature;
}

std::string describe(uint64_t signature, uint64_t count, std::optional<double> factor) {
    const int call = CALL.get(signature);
    if (call >= CALLS) return "an unknown call";
    const Described& of = call_names[call];
    const int root = ROOT.get(signature) - 1;
    const std::string root_name = !of.root ? "" : root < 0 ? format("%s any", of.root) : format("%s %d", of.root, root);
    if (!of.arrays) return format("%s(%s)", of.name, root_name.c_str());
    if (of.at_most) return format("%s(at most %" PRIu64 " bytes, %s)", of.name, count, root_name.c_str());
    const bool counts = COUNTS.get(signature);
    std::string text = format("%s(%s", of.name, dtype_name(DTYPE.get(signature)));
    if (call != RC_ALL_TO_ALL || !counts) text += format(" x %" PRIu64 "%s", count, counts ? " in all" : "");
    if (of.blocks) text += counts ? ", with counts" : " per rank";
    const int op = OP.get(signature);
    if (of.reduces) text += format(", %s", op_name(op));
    if (of.reduces && op == RC_PREMUL_SUM && factor && !counts) text += format("(%.17g)", *factor);
    if (of.root) text += ", " + root_name;
    return text + (ON_GPUS.get(signature) ? ") on GPUs" : ")");
}

std::string describe_message(uint64_t signature, uint64_t count, int64_t tag) {
    const bool any = tag == RC_ANY_TAG && call_of(signature) >= CALL_RECV_MESSAGE;
    return describe(signature, count) + " with " + (any ? "any tag" : format("tag %" PRId64, tag));
}

std::string describe_beside(const Signature& of, const Signature& first) {
    const bool counts = COUNTS.get(of.word) && of.extra != first.extra;
    return describe(of) + (counts ? ", other counts than on rank 0" : "");
}

}  // namespace ringcomm
