#include "core/signature.h"

#include <cinttypes>
#include <iterator>

#include "core/collectives.h"
#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

// Which facts of a call its description needs.
struct Described {
    const char* name;
    bool arrays, blocks;
    bool reduces;
    const char* root;  // how the root is called, nullptr if there is none
};

constexpr Described described(const Collective& row) {
    const bool arrays = row.given != Data::NOTHING;
    return {row.name, arrays, arrays && row.given != Data::ARRAY, row.reduces, row.rooted() ? "root" : nullptr};
}

constexpr Described kinds[] = {
#define COLLECTIVE_ROW(name, NAME, ...) described(collectives[RC_##NAME]),
#include "ringcomm/types.def"
    {"send", true, false, false, "to"},
    {"recv", true, false, false, "from"},
};
static_assert(std::size(kinds) == CALLS);

}  // namespace

const char* kind_name(int kind) { return kinds[kind].name; }

// | kind 8 | dtype 8 | op 8 | counts 8 | root 24 | … | direct 1 |
uint64_t signature_of(int kind, int dtype, int op, int root, bool counts) {
    const Described& k = kinds[kind];
    uint64_t word = kind;
    if (k.arrays) word |= uint64_t(dtype) << 8;
    if (k.reduces) word |= uint64_t(op) << 16;
    if (counts) word |= uint64_t{1} << 24;
    if (k.root) word |= (uint64_t(root + 1) & 0xffffff) << 32;
    return word;
}

std::string describe(uint64_t signature, uint64_t count, std::optional<double> factor) {
    const int kind = signature & 0xff;
    if (kind >= CALLS) return "an unknown call";
    const Described& k = kinds[kind];
    if (!k.arrays) return std::string(k.name) + "()";
    const bool counts = signature >> 24 & 1;
    std::string text = format("%s(%s", k.name, dtype_name(signature >> 8 & 0xff));
    if (kind != RC_ALL_TO_ALL || !counts) text += format(" x %" PRIu64 "%s", count, counts ? " in all" : "");
    if (k.blocks) text += counts ? ", with counts" : " per rank";
    const int op = signature >> 16 & 0xff;
    if (k.reduces) text += format(", %s", op_name(op));
    if (k.reduces && op == RC_PREMUL_SUM && factor && !counts) text += format("(%.17g)", *factor);
    const int root = int(signature >> 32 & 0xffffff) - 1;
    if (k.root) text += root < 0 ? format(", %s any", k.root) : format(", %s %d", k.root, root);
    return text + ")";
}

}  // namespace ringcomm
