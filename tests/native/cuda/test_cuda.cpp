// The CUDA kernels on the emulated device: every collective against a plain loop, in many calls on the same arenas.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <string>

#include "emulated_world.h"
#include "float_formats.h"
#include "kernels/cpu/kernels.h"

using namespace gpu;
using enum ringcomm::Kind;

namespace {

template <class T>
T one_of(std::initializer_list<T> values) {
    return values.begin()[random_bits() % values.size()];
}

// ---- Conversions: every small float, and each float32 near the middle between two of them.

// The reference for the type of an element in types.def.
template <class T>
struct FormatOf {
    static T decode(T x) { return x; }
    static T encode(T x) { return x; }
};
template <>
struct FormatOf<Float16> : Half {};
template <>
struct FormatOf<Bfloat16> : Brain {};
template <>
struct FormatOf<Float8E4m3fn> : E4m3 {};
template <>
struct FormatOf<Float8E5m2> : E5m2 {};

template <class Type>
void check_format(const char* name) {
    using Format = FormatOf<Type>;
    using Bits = typename Type::Stored;
    const std::string narrow = name + std::string(" narrow "), widen = name + std::string(" widen ");
    const auto same_bits = [](Bits a, Bits b) {
        return a == b || (std::isnan(Format::decode(a)) && std::isnan(Format::decode(b)));
    };
    const auto same = [](float a, float b) { return std::isnan(a) ? std::isnan(b) : !memcmp(&a, &b, sizeof a); };
    const auto check_narrow = [&](float low, float high) {
        const auto pair = Type::narrow(low, high);
        const Bits halves[] = {static_cast<Bits>(pair), static_cast<Bits>(pair >> 8 * sizeof(Bits))};
        expect(same_bits(halves[0], Format::encode(low)), narrow + std::to_string(low));
        expect(same_bits(halves[1], Format::encode(high)), narrow + std::to_string(high));
        // By integer arithmetic, as GPUs without the instructions.
        if constexpr (sizeof(Bits) == 1)
            expect(same_bits(static_cast<Bits>(Type::narrow(low)), Format::encode(low)), narrow + std::to_string(low));
    };
    for (uint32_t i = 0; i < 1u << 8 * sizeof(Bits); ++i) {
        const Bits bits = static_cast<Bits>(i), other = static_cast<Bits>(random_bits());
        float low, high;
        Type::widen(static_cast<typename Type::Pair>(uint32_t{other} << 8 * sizeof(Bits) | bits), low, high);
        const float value = Format::decode(bits);
        expect(same(value, low), widen + std::to_string(i));
        expect(same(Format::decode(other), high), widen + std::to_string(other));
        if constexpr (std::is_same_v<Type, Float8E4m3fn>) {
            Type::widen_shifted(static_cast<uint16_t>(other << 8 | bits), low, high);
            expect(same(value, low) && same(Format::decode(other), high), widen + std::to_string(i) + " shifted");
        }
        if (std::isnan(value)) continue;
        const float next = Format::decode(static_cast<Bits>(i + 1)), middle = value + (next - value) / 2;
        for (const float x : {value, middle, std::nextafter(middle, INFINITY), std::nextafter(middle, -INFINITY)})
            check_narrow(x, high), check_narrow(high, x);
    }
    for (int i = 0; i < 100'000; ++i) {
        const auto any = [] { return bits_as<float>(static_cast<uint32_t>(random_bits())); };
        check_narrow(any(), any());
    }
}

// ---- Data.

uint64_t item_of(int dtype) { return rc_dtype_bytes(dtype); }

constexpr ringcomm::Kind kinds[] = {
#define DTYPE_ROW(name, NAME, bytes, kind, ...) kind,
#include "ringcomm/types.def"
};

bool is_complex(int dtype) { return kinds[dtype] == COMPLEX; }
bool is_float(int dtype) { return is_complex(dtype) || kinds[dtype] == REAL; }

template <class T>
using Part = std::conditional_t<std::is_arithmetic_v<T>, Number<T, REAL>, T>;

// The value of one part of an element.
float value_at(int dtype, const byte* at) {
    switch (dtype) {
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) \
    case NAME:                                               \
        return static_cast<float>(                           \
            FormatOf<element>::decode(*reinterpret_cast<const typename Part<element>::Stored*>(at)));
#include "ringcomm/types.def"
        default: return NAN;
    }
}

void put_value(int dtype, byte* at, float value) {
    switch (dtype) {
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced)                             \
    case NAME: {                                                                         \
        const typename Part<element>::Stored part =                                      \
            FormatOf<element>::encode(static_cast<typename Part<element>::Wide>(value)); \
        memcpy(at, &part, sizeof part);                                                  \
    } break;
#include "ringcomm/types.def"
    }
}

// Exact: values whose sums and products over all ranks are exact in any order, because the ring has its own.
void fill(byte* at, uint64_t count, int dtype, int op, bool exact) {
    const uint64_t bytes = count * item_of(dtype), part = is_complex(dtype) ? item_of(dtype) / 2 : item_of(dtype);
    for (uint64_t i = 0; i < bytes; i += part) {
        const float value = op == PROD ? one_of({1.f, 2.f, -1.f}) : one_of({0.f, 1.f});
        if (dtype == BOOL) {
            at[i] = random_bits() & 1;
        } else if (!is_float(dtype) || (!exact && random_bits() % 2)) {
            for (uint64_t b = 0; b < part; ++b) at[i + b] = static_cast<byte>(random_bits());
        } else {
            put_value(dtype, at + i, exact ? value : static_cast<float>(random_bits() % 20001 / 1000.0 - 10));
        }
    }
}

bool same_values(int dtype, const byte* a, const byte* b, uint64_t count) {
    if (!is_float(dtype)) return !memcmp(a, b, count * item_of(dtype));
    const uint64_t part = is_complex(dtype) ? item_of(dtype) / 2 : item_of(dtype);
    alignas(16) byte x[16], y[16];
    for (uint64_t i = 0; i < count * item_of(dtype); i += part) {
        memcpy(x, a + i, part), memcpy(y, b + i, part);
        if (memcmp(x, y, part) && !(std::isnan(value_at(dtype, x)) && std::isnan(value_at(dtype, y)))) return false;
    }
    return true;
}

// The CPU's result; float8 is reduced in float32.
std::vector<byte> reduced(std::vector<const byte*> inputs, uint64_t count, int dtype, int op, double factor) {
    std::vector<byte> result(count * item_of(dtype) + 1);
    const int n = static_cast<int>(inputs.size());
    const auto reduce = [&](void* to, const void* from, int type) {
        expect(!rc_reduce(to, static_cast<const void* const*>(from), n, count, type, op, factor), "rc_reduce");
    };
    if (ringcomm::reducible(dtype, op)) {
        reduce(result.data(), inputs.data(), dtype);
        return result;
    }
    std::vector<std::vector<float>> wide(n, std::vector<float>(count + 1));
    std::vector<const float*> sources;
    for (int r = 0; r < n; ++r) {
        for (uint64_t i = 0; i < count; ++i) wide[r][i] = value_at(dtype, inputs[r] + i);
        sources.push_back(wide[r].data());
    }
    reduce(wide[0].data(), sources.data(), FLOAT32);
    for (uint64_t i = 0; i < count; ++i) put_value(dtype, &result[i], wide[0][i]);
    return result;
}

// ---- One call on all ranks of a world, and its expected result.

struct Case {
    int kernel, dtype, op;
    uint64_t count;
    int root = 0, blocks = 1;
    double factor = 1;
    bool in_place = false, tables = false, symmetric = false;
    int odd = 99;
    bool multicast = false;    // the symmetric buffers have a multicast address
    bool overwritten = false;  // each rank writes its arrays as soon as its launch has ended
    uint64_t width = 0;        // of rows to which RMSNorm is applied; 0: to none

    std::string describe(int n) const {
        return "kernel " + std::to_string(kernel) + " dtype " + std::to_string(dtype) + " op " + std::to_string(op) +
               " count " + std::to_string(count) + " root " + std::to_string(root) + " blocks " +
               std::to_string(blocks) + " ranks " + std::to_string(n) + (in_place ? " in place" : "") +
               (tables ? " with tables" : "") + (symmetric ? " symmetric" : "") + (multicast ? " multicast" : "") +
               (width ? " width " + std::to_string(width) : "");
    }
};

using Table = std::vector<uint64_t>;

constexpr float EPSILON = 1e-5f;  // of RMSNorm

struct Trial {
    World& world;
    const Case& test;
    const int n = world.shape.ranks;
    const uint64_t item = item_of(test.dtype), shift = test.width ? 0 : random_bits() % 2 * 4;
    std::vector<Table> send, recv;  // the offsets of each rank
    std::vector<Memory> inputs, outputs;
    std::vector<Memory> residual, weight, normalized;  // the first two: the same for all ranks
    std::vector<gpu::Args> calls;
    std::vector<byte*> input_bases, output_bases;

    Trial(World& world, const Case& test) : world(world), test(test) {}

    bool blocks_in() const {
        return test.kernel == RING_REDUCE_SCATTER || test.kernel == ONE_SHOT_REDUCE_SCATTER || test.kernel == SCATTER ||
               test.kernel == ALL_TO_ALL;
    }
    bool blocks_out() const {
        return test.kernel == RING_ALL_GATHER || test.kernel == ALL_GATHER || test.kernel == GATHER ||
               test.kernel == ALL_TO_ALL;
    }
    uint64_t length(int from, int to) const {  // of the block from one rank to another
        if (!test.tables) return test.count;
        const uint64_t all_to_all = test.kernel == ALL_TO_ALL ? from * 7 : 0;
        const int owner = blocks_in() ? to : from;
        return (test.count + owner * 5 + all_to_all) % (test.count + 1);
    }

    void run() {
        const bool exact = test.kernel <= RING_REDUCE || test.width;  // then squares are summed exactly, in any order
        if (test.width) {
            residual.emplace_back(test.count * item, 0), weight.emplace_back(test.width * item, 0);
            fill(residual[0].data(), test.count, test.dtype, PROD, exact);
            fill(weight[0].data(), test.width, test.dtype, PROD, exact);
        }
        for (int r = 0; r < n; ++r) {
            Table sends{0}, receives{0};
            for (int p = 0; p < n; ++p) sends.push_back(sends.back() + length(r, p));
            for (int p = 0; p < n; ++p) receives.push_back(receives.back() + length(p, r));
            send.push_back(sends), recv.push_back(receives);
        }
        for (int r = 0; r < n; ++r) {
            const uint64_t in = blocks_in() ? send[r][n] : length(r, r), out = blocks_out() ? recv[r][n] : length(r, r);
            if (test.symmetric || test.width) {  // at the same alignment on all ranks
                inputs.emplace_back(in * item, shift), outputs.emplace_back(out * item, shift);
            } else {
                inputs.emplace_back(in * item), outputs.emplace_back(out * item);
            }
            fill(inputs[r].data(), in, test.dtype, test.op, exact);
            gpu::Args a = world.args(r, test.kernel, test.dtype, test.op, test.count);
            a.input = inputs[r].data();
            a.output = outputs[r].data();
            if (test.in_place && in == out && !test.tables) {  // else blocks would move
                memcpy(outputs[r].data(), inputs[r].data(), in * item);
                a.input = a.output;
            }
            if (test.tables) a.send_offsets = send[r].data(), a.recv_offsets = recv[r].data();
            a.root = test.root;
            a.factor = test.factor;
            if (test.width) {
                normalized.emplace_back(out * item, 0);
                a.norm = {residual[0].data(), weight[0].data(), normalized[r].data(), test.width, EPSILON};
            }
            calls.push_back(a);
        }
        if (test.symmetric) locate();

        if (test.overwritten) {
            world.after = [&](int r) { memset(inputs[r].data(), r, test.count * item); };
            world.launch(calls, test.blocks);
            world.after = nullptr;
            return;
        }
        world.launch(calls, test.blocks);
        for (int r = 0; r < n; ++r) {
            expect(!world.control[r].failed, "failed: " + test.describe(n));
            check(r);
        }
    }

    // Every array is at the same location of a symmetric buffer, except that of the odd rank.
    void locate() {
        const uint64_t offset = 3 * PACK + shift;  // buffers are aligned to pages
        for (int r = 0; r < n; ++r) input_bases.push_back(const_cast<byte*>(calls[r].input) - offset);
        for (int r = 0; r < n; ++r) output_bases.push_back(calls[r].output - offset);
        const int odd = test.odd < n && n > 1 ? test.odd : -1;
        for (int r = 0; r < n; ++r) {
            calls[r].input_location = {input_bases.data(), 3, offset + (r == odd)};
            calls[r].output_location = calls[r].input_location;
            if (calls[r].output != calls[r].input)
                calls[r].output_location = {output_bases.data(), 4, offset + (r == odd)};
            if (!test.multicast) continue;  // the emulated device does not access the address itself
            calls[r].input_location.multicast = input_bases[r];
            calls[r].output_location.multicast = output_bases[r];
        }
    }

    void check(int r) {
        if (test.width) return check_norm(r);
        const auto [wanted, count] = expected(r);
        const bool right = same_values(test.dtype, outputs[r].data(), wanted.data(), count);
        expect(right, test.describe(n) + ", on rank " + std::to_string(r));
        const uint64_t room = std::max(count, blocks_out() ? recv[r][n] : length(r, r));
        expect(outputs[r].margins_hold(room * item), "margin, " + test.describe(n));
    }

    void check_norm(int r) {
        std::vector<const byte*> parts;
        for (auto& input : inputs) parts.push_back(input.data());
        std::vector<byte> sums = reduced(parts, test.count, test.dtype, SUM, 1), scaled(sums.size());
        const auto value = [&](const byte* array, uint64_t i) { return value_at(test.dtype, array + i * item); };
        const auto put = [&](std::vector<byte>& array, uint64_t i, float x) {
            put_value(test.dtype, &array[i * item], x);
        };
        for (uint64_t row = 0; row < test.count; row += test.width) {
            double squares = 0;
            for (uint64_t i = row; i < row + test.width; ++i) {
                put(sums, i, value(sums.data(), i) + value(residual[0].data(), i));
                squares += std::pow(value(sums.data(), i), 2.0);
            }
            const float mean = static_cast<float>(squares / static_cast<double>(test.width));
            const float scale = 1 / std::sqrt(mean + EPSILON);
            for (uint64_t i = row; i < row + test.width; ++i) {
                put(scaled, i, value(sums.data(), i) * scale);
                put(scaled, i, value(scaled.data(), i) * value(weight[0].data(), i - row));
            }
        }
        const uint64_t bytes = test.count * item;
        expect(!memcmp(outputs[r].data(), sums.data(), bytes), "sums, " + test.describe(n));
        expect(!memcmp(normalized[r].data(), scaled.data(), bytes), "normalized, " + test.describe(n));
        expect(outputs[r].margins_hold(bytes) && normalized[r].margins_hold(bytes), "margin, " + test.describe(n));
    }

    // The bytes of rank r's output, and how many of its elements are defined.
    std::pair<std::vector<byte>, uint64_t> expected(int r) {
        const auto sum = [&](uint64_t begin, uint64_t count) {
            std::vector<const byte*> parts;
            for (auto& input : inputs) parts.push_back(input.data() + begin * item);
            return std::pair(reduced(parts, count, test.dtype, test.op, test.factor), count);
        };
        std::vector<byte> blocks;
        const auto take = [&](int from, uint64_t begin, uint64_t count) {
            const byte* at = inputs[from].data() + begin * item;
            blocks.insert(blocks.end(), at, at + count * item);
        };
        switch (test.kernel) {
            case RING_ALL_REDUCE:
            case ONE_SHOT:
            case TWO_SHOT:
            case LL: return sum(0, test.count);
            case RING_REDUCE:
            case ONE_SHOT_REDUCE: return sum(0, r == test.root ? test.count : 0);
            case RING_REDUCE_SCATTER:
            case ONE_SHOT_REDUCE_SCATTER: return sum(send[r][r], length(r, r));
            case RING_BROADCAST:
            case BROADCAST: take(test.root, 0, test.count); break;
            case SCATTER: take(test.root, send[test.root][r], length(test.root, r)); break;
            case GATHER:
                if (r != test.root) break;
                [[fallthrough]];
            case RING_ALL_GATHER:
            case ALL_GATHER:
                for (int p = 0; p < n; ++p) take(p, 0, length(p, r));
                break;
            case ALL_TO_ALL:
                for (int p = 0; p < n; ++p) take(p, send[p][r], length(p, r));
                break;
        }
        const uint64_t count = blocks.size() / item;
        blocks.push_back(0);
        return {blocks, count};
    }
};

void run_case(World& world, const Case& test) { Trial(world, test).run(); }

// Every kernel with every dtype and operation.
std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (int kernel = 0; kernel < KERNELS; ++kernel)
        for (int dtype = 0; dtype < DTYPES; ++dtype)
            for (int op = 0; op < (kernel > LL || !kernel ? 1 : OPS); ++op)
                if (ringcomm::legal(kinds[dtype], op)) cases.push_back({kernel, dtype, op, 0});
    return cases;
}

// Several calls in one world, everything else at random.
void check_calls(int n, uint64_t seed, std::span<Case> cases) {
    const int channels = 1 + random_bits() % 3;
    World world(
        one_of({tiny_shape(n, channels), Shape{n, channels, 4, 512, 256, 64}, Shape{n, channels, 8, 2048, 1024, 512}}));
    world.threads = one_of({1, 2, 2, 3});
    world.seed = seed;
    world.set_epoch(one_of<uint64_t>({0, 1, LL_CLEAN_PERIOD - 3, (uint64_t{1} << 32) - 4, (uint64_t{1} << 40) - 4}));
    for (Case test : cases) {
        const bool blocks = test.kernel == RING_REDUCE_SCATTER || test.kernel == ONE_SHOT_REDUCE_SCATTER ||
                            test.kernel == RING_ALL_GATHER || test.kernel >= GATHER;
        world.one_grid = random_bits() % 2;
        test.count = one_of<uint64_t>({0, 1, 3, 16, 17, 100, 255, 500});
        test.root = static_cast<int>(random_bits() % n);
        test.blocks = 1 + static_cast<int>(random_bits() % channels);
        test.factor = test.op == PREMUL_SUM || test.op == AVG ? one_of({1.0, 0.5, 2.0}) : 1;
        if (test.op == AVG && !is_float(test.dtype))
            test.factor = one_of({1.0, 0.5, 2.0, 1e300});  // no integer holds it
        test.in_place = random_bits() % 2;
        test.tables = blocks && random_bits() % 2;
        test.symmetric = random_bits() % 2;
        test.multicast = random_bits() % 2;
        test.odd = static_cast<int>(random_bits() % 16);
        const bool normalizes = test.dtype == FLOAT16 || test.dtype == BFLOAT16 || test.dtype == FLOAT32;
        if (test.kernel == ONE_SHOT && test.op == SUM && normalizes && random_bits() % 2) {
            test.width = PACK / item_of(test.dtype) * one_of<uint64_t>({1, 2});  // the longest of the tiny shape
            test.count = test.width * one_of<uint64_t>({1, 3, 7, 20});
        }
        run_case(world, test);
    }
}

constexpr size_t CALLS = 12;  // in one world

void check_collectives() {
    std::vector<Case> cases = all_cases();
    std::shuffle(cases.begin(), cases.end(), random_bits);
    for (size_t next = 0; next < cases.size(); next += CALLS) {
        const size_t count = std::min(CALLS, cases.size() - next);
        check_calls(static_cast<int>(next / CALLS % 8) + 1, one_of<uint64_t>({0, 1, random_bits()}),
                    std::span(cases).subspan(next, count));
    }
}

// A seed decides everything: the world, the calls, and when threads yield.
void check_seeds(uint64_t first, uint64_t count) {
    const std::vector<Case> cases = all_cases();
    for (uint64_t seed = first; seed < first + count; ++seed) {
        random_bits.seed(seed);
        std::vector<Case> chosen;
        for (size_t i = 0; i < CALLS; ++i) chosen.push_back(cases[random_bits() % cases.size()]);
        const int before = failures;
        check_calls(1 + static_cast<int>(random_bits() % 8), seed, chosen);
        if (failures > before) std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    }
}

// More ranks than LL has in flight, and more peers than a block has threads.
void check_many_ranks() {
    World world(tiny_shape(10));
    for (int kernel = 0; kernel < KERNELS; ++kernel)
        for (const uint64_t count : {3, 100}) run_case(world, {kernel, INT32, SUM, count});
}

// A line left by an epoch with the same 31 bits must not be read as one of this epoch: it is zeroed before.
void check_stale_lines() {
    World world(tiny_shape(3, 1));
    world.set_epoch(LL_CLEAN_PERIOD - 2);
    for (int r = 0; r < 3; ++r)
        for (uint64_t epoch = LL_CLEAN_PERIOD + 2; epoch < LL_CLEAN_PERIOD + 4; ++epoch)
            for (int from = 0; from < 3; ++from)
                for (uint32_t w = 0; w < world.shape.line_bytes / 4; ++w)
                    world.arena(r).channel(0).lines(epoch, from)[w] = uint64_t(LINE_FLAG | epoch) << 32 | 4711;
    run_case(world, {BARRIER, INT32, SUM, 0});
    for (int i = 0; i < 2; ++i) run_case(world, {RING_ALL_REDUCE, INT32, SUM, 5});
    for (int r = 0; r < 3; ++r)
        for (uint64_t epoch = 0; epoch < 2; ++epoch)
            for (uint32_t i = 0; i < 3 * world.shape.line_bytes / 4; ++i)
                expect(!world.arena(r).channel(0).lines(epoch, 0)[i], "a stale line");
    for (int i = 0; i < 4; ++i) run_case(world, {LL, INT32, SUM, 4});
}

// Arrays at the same location of symmetric buffers do not pass through slots; others do.
void check_symmetric() {
    for (const int kernel : {RING_ALL_REDUCE, RING_REDUCE_SCATTER, RING_ALL_GATHER, ALL_TO_ALL})
        for (const int odd : {99, 1}) {
            World world(tiny_shape(3));
            run_case(world, {.kernel = kernel,
                             .dtype = FLOAT32,
                             .op = SUM,
                             .count = 100,
                             .blocks = 2,
                             .in_place = kernel == RING_ALL_REDUCE,
                             .symmetric = true,
                             .odd = odd});
            const DeviceArena arena = world.arena(2);
            const Channel channel = arena.channel(1);
            const bool staged =
                std::any_of(channel.slots(), channel.base + world.layout.channel_bytes, [](byte b) { return b; });
            expect(staged == (odd == 1), "kernel " + std::to_string(kernel) + " stages");
        }
}

// Once along the ring data go in four pieces for each rank, so that the last one does not wait long for the first.
void check_pieces() {
    constexpr int RANKS = 3;
    for (const int kernel : {RING_BROADCAST, RING_REDUCE}) {
        World world(Shape{RANKS, 1, 3, 1 << 16, 256, 256});
        run_case(world, {kernel, INT32, SUM, 12'000});
        uint64_t most = 0;
        for (int r = 0; r < RANKS; ++r)
            for (int p = 0; p < RANKS; ++p) most = std::max(most, *world.arena(r).channel(0).tail(p) % STEPS);
        expect(most == 4 * RANKS, "kernel " + std::to_string(kernel) + " in " + std::to_string(most) + " pieces");
    }
}

// With a multicast address the switch sums and stores the whole packs of an array, where that is aligned.
void check_multicast() {
    for (const int kernel : {RING_ALL_REDUCE, RING_REDUCE_SCATTER, RING_ALL_GATHER})
        for (const bool multicast : {true, false})
            for (int repeat = 0; repeat < 8; ++repeat) {
                World world(tiny_shape(3));
                const uint64_t before = multimem_accesses;
                Case test{.kernel = kernel, .dtype = FLOAT16, .op = SUM, .count = 100 + repeat % 2 * 4, .blocks = 2};
                test.symmetric = true;
                test.multicast = multicast;
                Trial trial(world, test);
                trial.run();
                const bool aligned = trial.shift == 0 && (kernel == RING_ALL_REDUCE || test.count % 8 == 0);
                const bool used = multimem_accesses > before;
                if (!multicast) expect(!used, "no multicast address, " + test.describe(3));
                if (multicast && aligned) expect(used, "aligned, " + test.describe(3));
                if (trial.shift) expect(!used, "not aligned, " + test.describe(3));
            }
}

void check_norms() {
    for (const int dtype : {FLOAT16, BFLOAT16, FLOAT32})
        for (const uint64_t packs : {1, 2})
            for (const bool in_place : {false, true}) {
                World world(tiny_shape(3));
                const uint64_t width = packs * PACK / item_of(dtype);
                for (const uint64_t rows : {1, 2, 9})
                    run_case(world, {.kernel = ONE_SHOT,
                                     .dtype = dtype,
                                     .op = SUM,
                                     .count = rows * width,
                                     .blocks = 2,
                                     .in_place = in_place,
                                     .width = width});
            }
}

// Data in one direction only, so that no other flag gives the order that a weakened one has lost; and repeated calls.
void check_races() {
    World world(tiny_shape(3, 1));
    for (int repeat = 0; repeat < 20; ++repeat) {
        run_case(world, {RING_BROADCAST, UINT8, SUM, 500});
        run_case(world, {BROADCAST, UINT8, SUM, 500});
        run_case(world, {ONE_SHOT, INT32, SUM, 100});
        run_case(world, {.kernel = ONE_SHOT, .dtype = FLOAT32, .op = SUM, .count = 48, .width = 8});
        run_case(world, {ONE_SHOT_REDUCE, INT32, SUM, 100});
        run_case(world, {TWO_SHOT, INT32, SUM, 100});
        run_case(world, {RING_ALL_REDUCE, INT32, SUM, 100});
        run_case(world, {.kernel = RING_ALL_REDUCE, .dtype = INT32, .op = SUM, .count = 100, .symmetric = true});
        run_case(world, {.kernel = RING_ALL_GATHER, .dtype = INT32, .op = SUM, .count = 100, .symmetric = true});
        for (const int kernel :
             {RING_ALL_REDUCE, RING_REDUCE_SCATTER, ALL_TO_ALL})  // peers must have read before it ends
            for (const bool multicast : {false, true})
                run_case(world, {.kernel = kernel,
                                 .dtype = INT32,
                                 .op = SUM,
                                 .count = 100,
                                 .symmetric = true,
                                 .multicast = multicast,
                                 .overwritten = true});
    }
}

}  // namespace

// test_cuda                everything once
// test_cuda seeds 1 1000   random calls from seeds 1 to 1,000
// test_cuda 2              races only, with publishing store 2 weakened
int main(int count, char** words) {
    if (count > 3) {
        check_seeds(atoi(words[2]), atoi(words[3]));
        std::printf("%d failures\n", failures);
        return failures != 0;
    }
    if (count > 1) {
#ifdef RC_WEAKEN
        weakened = atoi(words[1]);
#endif
        check_races();
        std::printf("test_cuda: done\n");
        return 0;
    }
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) \
    if constexpr (!std::is_arithmetic_v<element>) check_format<element>(#name);
#include "ringcomm/types.def"
    check_collectives();
    check_symmetric();
    check_pieces();
    check_multicast();
    check_norms();
    check_many_ranks();
    check_stale_lines();
    check_races();
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
