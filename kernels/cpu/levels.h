// The instruction-set levels of the kernels. level.inc is compiled once per level, each time with other flags. All its
// definitions are in a namespace per level, or the linker could merge in code that this CPU cannot run.
#pragma once

#include "kernels.h"

// RC_SCALAR (for ThreadSanitizer) allows only plain loads and stores, which a sanitizer can see.
#if defined(__x86_64__) && !defined(RC_SCALAR)
#define RC_X86 1
#else
#define RC_X86 0
#endif
#if defined(__aarch64__) && !defined(RC_SCALAR)
#define RC_ARM 1
#else
#define RC_ARM 0
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
#if RC_ARM
namespace neon {
extern const Kernels table;
}
#endif
}  // namespace ringcomm
