// Argument checks. Each throws RC_ARGUMENT, before anything is sent.
#pragma once

#include "collectives/call_record.h"
#include "core/errors.h"

namespace ringcomm {

void check_rank(const char* name, int value, int least, int size);
void check_collective(int collective);
void check_dtype(int dtype);
void check_reducible(int dtype, int op, bool on_gpu = false);
void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes);
// Also fills in call.item.
void check_call(CallRecord& call, int rank, int size, bool on_gpu = false);

}  // namespace ringcomm
