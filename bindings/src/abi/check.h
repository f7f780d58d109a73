// Argument checks. Each throws RC_ARGUMENT, before anything is sent.
#pragma once

#include "collectives/call.h"
#include "core/errors.h"

namespace ringcomm {

void check_rank(const char* name, int value, int least, int size);
void check_collective(int collective);
void check_dtype(int dtype);
void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes);
// Also fills in call.item.
void check_call(Call& call, int rank, int size, bool on_gpu = false);

}  // namespace ringcomm
