// What dtypes and operations are called, in the order of ringcomm.h. A code that is none has no bytes and no name.
#include <iterator>

#include "kernels.h"

namespace ringcomm {
namespace {

struct Dtype {
    const char* name;
    size_t bytes;
};

// clang-format off: a row a line
constexpr Dtype dtypes[] = {
    {"bool", 1},
    {"int8", 1},
    {"uint8", 1},
    {"int16", 2},
    {"uint16", 2},
    {"int32", 4},
    {"uint32", 4},
    {"int64", 8},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
};
// clang-format on
static_assert(std::size(dtypes) == RC_DTYPES);

constexpr const char* ops[] = {"sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "premul_sum"};
static_assert(std::size(ops) == RC_OPS);

constexpr Dtype dtype_of(int code) { return code >= 0 && code < RC_DTYPES ? dtypes[code] : Dtype{"?", 0}; }

}  // namespace

size_t dtype_bytes(int dtype) { return dtype_of(dtype).bytes; }

const char* dtype_name(int dtype) { return dtype_of(dtype).name; }

const char* op_name(int op) { return op >= 0 && op < RC_OPS ? ops[op] : "?"; }

}  // namespace ringcomm
