// Each kernel is compiled once, not once for each dtype and operation: its arithmetic is dispatched through a table.
#include "cuda/emulated.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {
namespace {

using namespace cuda;

// Arithmetic, with its accumulators in untyped memory.
struct Functions {
    uint64_t item;
    void (*open)(const Args&, const Pack&, void* wide, bool input);
    void (*combine)(const Args&, void* acc, const void* wide);
    Pack (*close)(const Args&, const void* wide, bool output);
};

template <class Math>
constexpr Functions functions_of{
    Math::item,
    [](const Args& args, const Pack& pack, void* wide, bool input) {
        const Math math(args);
        *static_cast<typename Math::Wide*>(wide) = input ? math.input(pack) : math.partial(pack);
    },
    [](const Args& args, void* acc, const void* wide) {
        Math(args).combine(*static_cast<typename Math::Wide*>(acc), *static_cast<const typename Math::Wide*>(wide));
    },
    [](const Args& args, const void* wide, bool output) {
        const auto& acc = *static_cast<const typename Math::Wide*>(wide);
        return output ? Math(args).output(acc) : Math(args).narrow(acc);
    },
};

template <int dtype, int op>
constexpr Functions cell() {
    using Type = typename TypeOf<dtype>::type;
    if constexpr (legal(Type::kind, op)) return functions_of<Arithmetic<Type, op>>;
    return {};
}

struct Table {
    Functions of[DTYPES][OPS];
};

template <int... cells>
constexpr Table make_table(std::integer_sequence<int, cells...>) {
    Table table{};
    ((table.of[cells / OPS][cells % OPS] = cell<cells / OPS, cells % OPS>()), ...);
    return table;
}

constexpr Table table = make_table(std::make_integer_sequence<int, int{DTYPES} * OPS>());

class DispatchedMath {
public:
    struct alignas(16) Wide {
        byte memory[PACK * sizeof(float)];  // 16 float8 as float32, the largest accumulator
    };
    static constexpr int tile = 2;
    const uint64_t item;

    explicit DispatchedMath(const Args& args) : item(of(args).item), args_(args), functions_(of(args)) {}

    Wide input(const Pack& pack) const { return open(pack, true); }
    Wide partial(const Pack& pack) const { return open(pack, false); }
    void combine(Wide& acc, const Wide& wide) const { functions_.combine(args_, &acc, &wide); }
    Pack narrow(const Wide& wide) const { return functions_.close(args_, &wide, false); }
    Pack output(const Wide& wide) const { return functions_.close(args_, &wide, true); }

private:
    static const Functions& of(const Args& args) { return table.of[args.dtype][args.op]; }
    Wide open(const Pack& pack, bool input) const {
        Wide wide{};
        functions_.open(args_, pack, &wide, input);
        return wide;
    }

    const Args& args_;
    const Functions& functions_;
};

using Run = void (*)(const Ctx&, const Args*, int);

template <int... kernels>
constexpr auto make_kernels(std::integer_sequence<int, kernels...>) {
    return std::array<Run, sizeof...(kernels)>{run_virtual<kernels, DispatchedMath>...};
}

constexpr auto kernel_table = make_kernels(std::make_integer_sequence<int, KERNELS>());

bool exists(const Args& args) {
    const auto in = [](int code, int end) { return code >= 0 && code < end; };
    return in(args.kernel, KERNELS) && in(args.dtype, DTYPES) && in(args.op, OPS) && table.of[args.dtype][args.op].item;
}

bool same_variant(const Args& a, const Args& b) { return a.kernel == b.kernel && a.dtype == b.dtype && a.op == b.op; }

}  // namespace

void launch_emulated(std::span<const Args> ranks, int blocks, int threads, uint64_t seed) {
    for (const Args& args : ranks) {
        if (!exists(args)) reject("unknown CUDA kernel, or an operation that the dtype does not have");
        if (!same_variant(args, ranks[0])) reject("the ranks of one launch have different kernels");
        if (blocks < 1 || blocks > args.arena.layout.shape.channels)
            reject("a CUDA launch has at most one block for each channel");
    }
    const int grid = static_cast<int>(ranks.size()) * blocks;
    std::vector<std::unique_ptr<BlockBarrier>> barriers;
    std::vector<std::thread> running;
    for (int b = 0; b < grid; ++b) barriers.push_back(std::make_unique<BlockBarrier>(threads));
    for (int b = 0; b < grid; ++b)
        for (int t = 0; t < threads; ++t)
            running.emplace_back([=, &barriers] {
                yield_state = seed ? mix(mix(seed, ranks[b / blocks].rank), b * threads + t) | 1 : 0;
                kernel_table[ranks[0].kernel]({t, threads, b, grid, barriers[b].get()}, ranks.data(), blocks);
            });
    for (auto& thread : running) thread.join();
}

}  // namespace ringcomm
