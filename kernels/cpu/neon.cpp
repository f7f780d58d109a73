// 64-bit Arm, of which every CPU has NEON.
#include "levels.h"

#if RC_ARM
#define RC_LEVEL neon
#define RC_LEVEL_NAME "neon"
#define RC_VECTOR_BYTES 16
#define RC_NEON
#include "level.inc"
#endif
