// The names and sizes of dtypes and operations. An unknown code has no bytes and no name.
#include "kernels.h"

namespace ringcomm {
namespace {

struct DtypeRow {
    const char* name;
    size_t bytes;
    Kind kind;
};

constexpr DtypeRow dtypes[] = {
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) {#name, bytes, kind},
#include "ringcomm/types.def"
};

constexpr const char* ops[] = {
#define OP_ROW(name, NAME, definition, kinds) #name,
#include "ringcomm/types.def"
};

bool is_dtype(int code) { return code >= 0 && code < RC_DTYPES; }
bool is_op(int code) { return code >= 0 && code < RC_OPS; }

}  // namespace

size_t dtype_bytes(int dtype) { return is_dtype(dtype) ? dtypes[dtype].bytes : 0; }

const char* dtype_name(int dtype) { return is_dtype(dtype) ? dtypes[dtype].name : "?"; }

const char* op_name(int op) { return is_op(op) ? ops[op] : "?"; }

bool reducible(int dtype, int op, bool on_gpu) {
    if (!is_dtype(dtype) || !is_op(op)) return false;
    return on_gpu ? legal(dtypes[dtype].kind, op) : kernels().reduce[dtype][op] != nullptr;
}

}  // namespace ringcomm
