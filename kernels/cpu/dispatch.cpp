// Selects the level of the kernels for this process.
#include <atomic>
#include <cstring>

#include "levels.h"

namespace ringcomm {
namespace {

struct Level {
    const Kernels* table;
    bool (*supported)();
};

// Best first. A level requires every instruction set that its file is compiled with.
constexpr Level levels[] = {
#if RC_X86
    {&avx512::table,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("f16c");
     }},
    {&avx2::table, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
#endif
    {&portable::table, [] { return true; }},
};

const Kernels* find(const char* name) {
    for (const Level& level : levels)
        if ((!*name || !std::strcmp(name, level.table->name)) && level.supported()) return level.table;
    return nullptr;
}

std::atomic<const Kernels*> selected{find("")};

}  // namespace

const Kernels& kernels() { return *selected.load(std::memory_order_relaxed); }

bool select_kernels(const char* level) {
    const Kernels* found = find(level);
    if (found) selected.store(found, std::memory_order_relaxed);
    return found != nullptr;
}

}  // namespace ringcomm
