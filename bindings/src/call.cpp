#include "call.h"

#include <cinttypes>
#include <iterator>

#include "errors.h"

namespace ringcomm {

namespace {

enum Shape { NOTHING, ARRAY, BLOCK };

// How each call is named, and which of its facts its words need: a new collective is a row here.
struct Kind {
    const char* name;
    Shape shape;  // `count` is the whole array or one rank's block
    bool reduces;
    const char* root;  // how the root is called, nullptr if there is none
};

// clang-format off: a row a line
constexpr Kind kinds[] = {
    {"barrier", NOTHING, false, nullptr},
    {"broadcast", ARRAY, false, "root"},
    {"reduce", ARRAY, true, "root"},
    {"all_reduce", ARRAY, true, nullptr},
    {"gather", BLOCK, false, "root"},
    {"scatter", BLOCK, false, "root"},
    {"all_gather", BLOCK, false, nullptr},
    {"reduce_scatter", BLOCK, true, nullptr},
    {"all_to_all", BLOCK, false, nullptr},
    {"split", NOTHING, false, nullptr},
    {"empty", NOTHING, false, nullptr},
    {"send", ARRAY, false, "to"},
    {"recv", ARRAY, false, "from"},
};
// clang-format on
static_assert(std::size(kinds) == CALLS);

}  // namespace

const char* kind_name(int kind) { return kinds[kind].name; }

// | kind 8 | dtype 8 | op 8 | counts 8 | root 24 | … | direct 1 |
uint64_t pack(int kind, int dtype, int op, int root, bool counts) {
    const Kind& k = kinds[kind];
    uint64_t word = kind;
    if (k.shape != NOTHING) word |= uint64_t(dtype) << 8;
    if (k.reduces) word |= uint64_t(op) << 16;
    if (counts) word |= uint64_t{1} << 24;
    if (k.root) word |= (uint64_t(root + 1) & 0xffffff) << 32;
    return word;
}

std::string describe(uint64_t signature, uint64_t count, std::optional<double> factor) {
    const int kind = signature & 0xff;
    if (kind >= CALLS) return "an unknown call";
    const Kind& k = kinds[kind];
    if (k.shape == NOTHING) return std::string(k.name) + "()";
    const bool counts = signature >> 24 & 1;
    std::string text = format("%s(%s", k.name, dtype_name(signature >> 8 & 0xff));
    if (kind != RC_ALL_TO_ALL || !counts) text += format(" x %" PRIu64 "%s", count, counts ? " in all" : "");
    if (k.shape == BLOCK) text += counts ? ", with counts" : " per rank";
    const int op = signature >> 16 & 0xff;
    if (k.reduces) text += format(", %s", op_name(op));
    if (k.reduces && op == RC_PREMUL_SUM && factor && !counts) text += format("(%.17g)", *factor);
    const int root = int(signature >> 32 & 0xffffff) - 1;
    if (k.root) text += root < 0 ? format(", %s any", k.root) : format(", %s %d", k.root, root);
    return text + ")";
}

}  // namespace ringcomm
