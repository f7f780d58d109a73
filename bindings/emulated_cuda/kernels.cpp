// Each kernel is compiled once, not once for each dtype and operation: its arithmetic is dispatched through a table.
#include "bindings/emulated_cuda/kernels.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

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
    double (*squares)(const Args&, const Pack&);  // this one and the next: nullptr unless Math::normalizes
    Pack (*scaled)(const Args&, const Pack&, float scale, const Pack& weight);
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
    nullptr,  // cell() adds these
    nullptr,
};

template <int dtype, int op>
constexpr Functions cell() {
    using Type = typename TypeOf<dtype>::type;
    if constexpr (legal(Type::kind, op)) {
        using Math = Arithmetic<Type, op>;
        Functions functions = functions_of<Math>;
        if constexpr (Math::normalizes) {
            functions.squares = [](const Args& args, const Pack& pack) { return Math(args).squares(pack); };
            functions.scaled = [](const Args& args, const Pack& pack, float scale, const Pack& weight) {
                return Math(args).scaled(pack, scale, weight);
            };
        }
        return functions;
    }
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
    static constexpr bool multimem = true, normalizes = true;
    const uint64_t item;

    explicit DispatchedMath(const Args& args) : item(of(args).item), args_(args), functions_(of(args)) {}

    Wide input(const Pack& pack) const { return open(pack, true); }
    Wide partial(const Pack& pack) const { return open(pack, false); }
    void combine(Wide& acc, const Wide& wide) const { functions_.combine(args_, &acc, &wide); }
    Pack narrow(const Wide& wide) const { return functions_.close(args_, &wide, false); }
    Pack output(const Wide& wide) const { return functions_.close(args_, &wide, true); }
    double squares(const Pack& pack) const { return functions_.squares(args_, pack); }
    Pack scaled(const Pack& pack, float scale, const Pack& weight) const {
        return functions_.scaled(args_, pack, scale, weight);
    }

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

const char* refusal_of(const Args& args, int blocks) {
    const auto in = [&](int rank) { return rank >= 0 && rank < args.arena.layout.shape.ranks; };
    if (!args.arena.base || !args.control) return "a rank has no arena or no control";
    if (!in(args.rank) || !in(args.root)) return "a rank is not in its group";
    if (!exists(args)) return "unknown CUDA kernel, or an operation that the dtype does not have";
    if (blocks < 1 || blocks > args.arena.layout.shape.channels)
        return "a CUDA launch has at most one block for each channel";
    return nullptr;
}

bool same_variant(const Args& a, const Args& b) { return a.kernel == b.kernel && a.dtype == b.dtype && a.op == b.op; }

}  // namespace

const char* cuda::refusal(std::span<const Args> ranks, int blocks) {
    for (const Args& args : ranks) {
        if (const char* why = refusal_of(args, blocks)) return why;
        if (!same_variant(args, ranks[0])) return "the ranks of one launch have different kernels";
    }
    return nullptr;
}

const char* cuda::refusal(const MessageArgs& args, int blocks) {
    const MessageShape& shape = args.arena.layout.shape;
    const auto in = [](int64_t index, int64_t end) { return index >= 0 && index < end; };
    if (!args.arena.base || !args.control || !args.completed) return "a rank has no arena, no control or no completion";
    if (args.count < 1 || args.count > TRANSFERS) return "a launch has at least one message, and at most 32";
    if (!in(args.launch, MAX_LAUNCHES)) return "at most 256 launches of messages are in flight";
    if (blocks < 1 || blocks > shape.channels) return "a CUDA launch has at most one block for each channel";
    for (const MessageTransfer& each : std::span(args.transfers, args.count)) {
        if (!in(each.kind, MESSAGE_KINDS) || !in(each.peer, shape.ranks)) return "a message of no kind, or of no peer";
        if (!each.arena || !in(each.slot, shape.slots) || each.bytes > shape.slot_bytes)
            return "a message in no slot, or beyond it";
    }
    return nullptr;
}

namespace {

// Runs run(thread, Ctx) for every thread of a grid.
template <class Run>
void run_grid(int grid, int threads, Run run) {
    std::vector<std::unique_ptr<BlockBarrier>> barriers;
    std::vector<std::thread> running;
    for (int b = 0; b < grid; ++b) barriers.push_back(std::make_unique<BlockBarrier>(threads));
    for (int b = 0; b < grid; ++b)
        for (int t = 0; t < threads; ++t)
            running.emplace_back([=, &barriers] { run(Ctx{t, threads, b, grid, barriers[b].get()}); });
    for (auto& thread : running) thread.join();
}

uint32_t yields_of(uint64_t seed, int rank, uint64_t thread) {
    return seed ? static_cast<uint32_t>(mix(mix(seed, rank), thread) | 1) : 0;
}

}  // namespace

void launch_emulated(std::span<const Args> ranks, int blocks, int threads, uint64_t seed) {
    run_grid(static_cast<int>(ranks.size()) * blocks, threads, [=](const Ctx& ctx) {
        yield_state = yields_of(seed, ranks[ctx.block / blocks].rank, ctx.block * threads + ctx.thread);
        kernel_table[ranks[0].kernel](ctx, ranks.data(), blocks);
    });
}

void launch_emulated(const MessageArgs& args, int blocks, int threads, uint64_t seed) {
    run_grid(blocks, threads, [=, &args](const Ctx& ctx) {
        yield_state = yields_of(seed, args.rank, args.call << 16 | (ctx.block * threads + ctx.thread));
        run_messages(ctx, args);
    });
}

}  // namespace ringcomm
