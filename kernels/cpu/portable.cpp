// Any CPU: vectors of 16 bytes, which every compiler lowers to what it has: SSE2 on x86-64, NEON on Arm.
#define RC_LEVEL portable
#define RC_LEVEL_NAME "portable"
#define RC_VECTOR_BYTES 16
#include "level.inc"
