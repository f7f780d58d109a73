// What a caller may not ask for: the rules of the arguments. Each throws RC_ARGUMENT, before anything is sent.
#pragma once

#include "call.h"
#include "errors.h"

namespace ringcomm {

[[noreturn]] void refuse(const std::string& message, const std::string& expected = "", const std::string& got = "");
void check_rank(const char* name, int value, int least, int size);
void check_collective(int collective);
void check_dtype(int dtype);
void check_disjoint(const void* source, size_t source_bytes, const void* target, size_t target_bytes);
// Also fills in call.item.
void check_call(Call& call, int rank, int size);

}  // namespace ringcomm
