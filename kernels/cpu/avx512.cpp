// x86-64 with AVX-512 F, BW, DQ and VL.
#include "levels.h"

#if RC_X86
#define RC_LEVEL avx512
#define RC_LEVEL_NAME "avx512"
#define RC_VECTOR_BYTES 64
#include "level.inc"
#endif
