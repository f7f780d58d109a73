// Selects the level of the kernels for this process.
#include <atomic>
#include <cstring>

#include "levels.h"

#if RC_X86
#include <cpuid.h>
#endif

namespace ringcomm {
namespace {

#if RC_X86
// What the CPU has and the operating system saves. By cpuid, because __builtin_cpu_supports relies on the runtime of
// the compiler, and that of zig, which builds the wheels, finds nothing.
struct Features {
    bool avx2, avx512;  // each with F16C; AVX-512 F, BW, DQ and VL
};

Features cpu_features() {
    constexpr unsigned YMM = 0x06, ZMM = 0xe6;  // the registers that are saved
    constexpr unsigned AVX512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C)) return {};
    asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
    return {(saved & YMM) == YMM && (b & bit_AVX2), (saved & ZMM) == ZMM && (b & AVX512) == AVX512};
}
#endif

struct Level {
    const Kernels* table;
    bool (*supported)();
};

// Best first. A level requires every instruction set that its file is compiled with.
constexpr Level levels[] = {
#if RC_X86
    {&avx512::table, [] { return cpu_features().avx512; }},
    {&avx2::table, [] { return cpu_features().avx2; }},
#endif
#if RC_ARM
    {&neon::table, [] { return true; }},
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
