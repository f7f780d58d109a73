// x86-64 with AVX2 and F16C.
#include "levels.h"

#if RC_X86
#define RC_LEVEL avx2
#define RC_LEVEL_NAME "avx2"
#define RC_VECTOR_BYTES 32
#include "level.inc"
#endif
