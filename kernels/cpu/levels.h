// The instruction-set levels of the kernels. level.inc is compiled once per level, with other compiler flags each time:
// all it defines lives in a namespace of its level, or the linker would merge code that this CPU cannot run.
#pragma once

#include "kernels.h"

// RC_SCALAR (for ThreadSanitizer) keeps to plain loads and stores, the only ones that a sanitizer sees.
#if defined(__x86_64__) && !defined(RC_SCALAR)
#define RC_X86 1
#else
#define RC_X86 0
#endif

namespace ringcomm {
namespace portable {
extern const Kernels table;
}
#if RC_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif
}  // namespace ringcomm
