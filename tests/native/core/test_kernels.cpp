// Every reduce kernel at every level of this CPU against plain scalar code, bit for bit (the payload of a NaN is free),
// and the non-temporal copy. As all levels must give the bits of the same reference, they give those of each other.
#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "float_formats.h"
#include "kernels/cpu/kernels.h"

using namespace ringcomm;

namespace {

int failures = 0;

void expect(bool holds, auto describe) {
    if (!holds && ++failures <= 20) std::printf("FAILED [%s] %s\n", kernels().name, describe().c_str());
}

void expect(bool holds, const char* what) {
    expect(holds, [&] { return std::string(what); });
}

std::mt19937_64 random_bits(20240229);

// ---- The dtypes: how they are stored, what they accumulate in, and what may be done with them.

bool defined(Kind kind, int op) {
    switch (op) {
        case RC_SUM:
        case RC_PROD: return true;
        case RC_MIN:
        case RC_MAX: return kind != COMPLEX;
        case RC_AVG: return kind != TRUTH;
        case RC_PREMUL_SUM: return kind == REAL || kind == COMPLEX;
        default: return kind == TRUTH || kind == INTEGER;
    }
}

template <class T, Kind K>
struct Native {
    using Stored = T;
    using Scalar = T;
    static constexpr Kind kind = K;
    static T decode(T x) { return x; }
    static T encode(T x) { return x; }
};

template <class Format>
struct SmallFloat : Format {
    using Stored = uint16_t;
    using Scalar = float;
    static constexpr Kind kind = REAL;
};

using Float16 = SmallFloat<Half>;
using Bfloat16 = SmallFloat<Brain>;

template <Kind K, class Element>
struct SpecOf : Native<Element, K> {};
template <class Part>
struct SpecOf<COMPLEX, Part> : Native<std::complex<Part>, COMPLEX> {};
template <class Format>
struct SpecOf<REAL, SmallFloat<Format>> : SmallFloat<Format> {};

template <int Dtype>
struct Spec;
#define CPU_AND_GPU(...) __VA_ARGS__
#define GPU_ONLY(...)
#define DTYPE_ROW(name, NAME, bytes, kind, element, reduced) \
    reduced(template <> struct Spec<RC_##NAME> : SpecOf<kind, element>{};)
#include "ringcomm/types.def"

template <class D>
bool same(typename D::Stored a, typename D::Stored b) {
    if constexpr (D::kind == COMPLEX) {
        using Part = Native<typename D::Scalar::value_type, REAL>;
        return same<Part>(a.real(), b.real()) && same<Part>(a.imag(), b.imag());
    } else {
        return !std::memcmp(&a, &b, sizeof a) || (D::decode(a) != D::decode(a) && D::decode(b) != D::decode(b));
    }
}

// ---- The reference: one element at a time, as API.md defines it.

template <class D, class T>
T combine(int op, T a, T b) {
    if constexpr (D::kind == TRUTH) {
        if (op == RC_SUM || op == RC_MAX || op == RC_BOR) return a || b;
        if (op == RC_PROD || op == RC_MIN || op == RC_BAND) return a && b;
        return a != b;
    } else if constexpr (D::kind == INTEGER) {
        using Wide = unsigned __int128;
        switch (op) {
            case RC_SUM:
            case RC_AVG: return static_cast<T>(Wide(a) + Wide(b));
            case RC_PROD: return static_cast<T>(Wide(a) * Wide(b));
            case RC_MIN: return b < a ? b : a;
            case RC_MAX: return b > a ? b : a;
            case RC_BAND: return static_cast<T>(a & b);
            case RC_BOR: return static_cast<T>(a | b);
            default: return static_cast<T>(a ^ b);
        }
    } else if constexpr (D::kind == REAL) {
        if (op == RC_PROD) return a * b;
        if (op != RC_MIN && op != RC_MAX) return a + b;
        if (std::isnan(a)) return a;
        if (std::isnan(b)) return b;
        return (op == RC_MIN ? a < b : a > b) ? a : b;
    } else {
        if (op != RC_PROD) return {a.real() + b.real(), a.imag() + b.imag()};
        return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    }
}

template <class D, class T>
T scale(T a, double factor) {
    if constexpr (D::kind == COMPLEX) {
        const auto f = static_cast<typename T::value_type>(factor);
        return {a.real() * f, a.imag() * f};
    } else {
        return static_cast<T>(a * static_cast<T>(factor));
    }
}

template <class D, class T>
T divide(T a, double divisor) {
    if constexpr (D::kind == COMPLEX) {
        const auto by = static_cast<typename T::value_type>(divisor);
        return {a.real() / by, a.imag() / by};
    } else if constexpr (D::kind == INTEGER) {
        return static_cast<T>(static_cast<__int128>(a) / static_cast<__int128>(std::max(divisor, 1.0)));
    } else {
        return static_cast<T>(a / static_cast<T>(divisor));
    }
}

template <class D>
using Arrays = std::vector<std::vector<typename D::Stored>>;

template <class D>
std::vector<typename D::Stored> reference(int op, const Arrays<D>& inputs, int n, double factor) {
    std::vector<typename D::Stored> result;
    for (size_t i = 0; i < inputs[0].size(); ++i) {
        const auto input = [&](int s) {
            const auto x = D::decode(inputs[s][i]);
            return op == RC_PREMUL_SUM ? scale<D>(x, factor) : x;
        };
        auto acc = input(0);
        for (int s = 1; s < n; ++s) acc = combine<D>(op, acc, input(s));
        result.push_back(D::encode(op == RC_AVG ? divide<D>(acc, n * factor) : acc));
    }
    return result;
}

// ---- Inputs: any bits, moderate numbers, and the special ones.

template <class T>
T random_bits_of() {
    const uint64_t bits = random_bits();
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class D>
typename D::Stored random_value() {
    using T = typename D::Stored;
    if constexpr (D::kind == TRUTH) {
        return random_bits() & 1;
    } else if constexpr (D::kind == INTEGER) {
        return random_bits_of<T>();
    } else if constexpr (D::kind == COMPLEX) {
        using Part = Native<typename T::value_type, REAL>;
        return {random_value<Part>(), random_value<Part>()};
    } else {
        using Scalar = typename D::Scalar;
        using Limits = std::numeric_limits<Scalar>;
        const Scalar infinity = Limits::infinity(), nan = Limits::quiet_NaN(), least = Limits::denorm_min();
        const Scalar special[] = {0,
                                  -Scalar(0),
                                  1,
                                  -1,
                                  65504,
                                  32768,
                                  Scalar(0x1p-24),
                                  Scalar(0x1p-14),
                                  Scalar(0x1p-15),
                                  infinity,
                                  -infinity,
                                  nan,
                                  Limits::max(),
                                  Limits::lowest(),
                                  Limits::min(),
                                  least};
        switch (random_bits() % 4) {
            case 0: return random_bits_of<T>();
            case 1: return D::encode(special[random_bits() % std::size(special)]);
            default: return D::encode(static_cast<Scalar>(random_bits() % 20001 / 1000.0 - 10));
        }
    }
}

// ---- Running a kernel.

// A copy of an array at an address that is `shift` bytes past an aligned one, and ends where its memory ends.
template <class T>
struct Shifted {
    Shifted(const std::vector<T>& values, size_t count, size_t by) : memory(by + count * sizeof(T)), shift(by) {
        if (count) std::memcpy(data(), values.data(), count * sizeof(T));
    }
    char* data() { return memory.data() + shift; }
    T at(size_t i) {
        T value;
        std::memcpy(&value, data() + i * sizeof(T), sizeof value);
        return value;
    }
    std::vector<char> memory;
    size_t shift;
};

// alias: the source that is also the destination; -1: none.
template <class D>
void check(int dtype, int op, const Arrays<D>& inputs, int n, size_t count, int alias, double factor,
           const std::vector<typename D::Stored>& expected) {
    using T = typename D::Stored;
    std::vector<Shifted<T>> arrays;
    for (int s = 0; s < n; ++s) arrays.emplace_back(inputs[s], count, random_bits() % 9);
    arrays.emplace_back(std::vector<T>(count), count, random_bits() % 9);
    std::vector<const void*> srcs;
    for (int s = 0; s < n; ++s) srcs.push_back(arrays[s].data());
    Shifted<T>& dst = arrays[alias < 0 ? n : alias];
    kernels().reduce[dtype][op](dst.data(), srcs.data(), n, count, factor);
    size_t wrong = 0;
    while (wrong < count && same<D>(dst.at(wrong), expected[wrong])) ++wrong;
    expect(wrong == count, [&] {
        return std::string(op_name(op)) + " of " + dtype_name(dtype) + ", n " + std::to_string(n) + ", count " +
               std::to_string(count) + ", alias " + std::to_string(alias) + ": element " + std::to_string(wrong);
    });
    for (int s = 0; s < n; ++s)
        if (s != alias && count)
            expect(!std::memcmp(arrays[s].data(), inputs[s].data(), count * sizeof(T)), "a source was changed");
}

template <int Dtype>
void check_dtype(const std::vector<std::string>& levels) {
    using D = Spec<Dtype>;
    constexpr int most = 7;
    constexpr size_t longest = 1031;
    Arrays<D> inputs(most);
    for (auto& input : inputs)
        for (size_t i = 0; i < longest; ++i) input.push_back(random_value<D>());
    expect(dtype_bytes(Dtype) == sizeof(typename D::Stored), "dtype_bytes");
    for (int op = 0; op < RC_OPS; ++op)
        for (int n : {1, 2, 3, 4, most}) {
            const double factor = 0.3;
            const bool allowed = defined(D::kind, op);
            const auto expected = allowed ? reference<D>(op, inputs, n, factor) : std::vector<typename D::Stored>();
            for (const auto& level : levels) {
                select_kernels(level.c_str());
                expect(!kernels().reduce[Dtype][op] == !allowed,
                       "an operation that the dtype has is missing, or one that it has not is there");
                if (!allowed || !kernels().reduce[Dtype][op]) continue;
                for (size_t count : {0, 1, 2, 3, 7, 8, 15, 31, 33, 64, 127, 255, 256, 301, 1031})
                    for (int alias = -1; alias < n; ++alias)
                        check<D>(Dtype, op, inputs, n, count, alias, factor, expected);
            }
        }
}

// Each of the 65536 patterns, alone and with partners that make every kind of rounding.
template <int Dtype>
void check_all_patterns(const std::vector<std::string>& levels) {
    using D = Spec<Dtype>;
    Arrays<D> inputs(2, std::vector<uint16_t>(1 << 16));
    for (int i = 0; i < 1 << 16; ++i) inputs[0][i] = static_cast<uint16_t>(i);
    const auto run = [&](int op, int n, double factor) {
        const auto expected = reference<D>(op, inputs, n, factor);
        for (const auto& level : levels) {
            select_kernels(level.c_str());
            check<D>(Dtype, op, inputs, n, 1 << 16, -1, factor, expected);
        }
    };
    run(RC_SUM, 1, 1);
    // A NaN whose mantissa is all ones would round up to -0, were it rounded.
    const double full_nan = std::bit_cast<double>(~uint64_t{0} >> 1);
    for (double factor : {1.0, 1.0 + 0x1p-11, 1.0 + 0x1p-8, 0.5, 0x1p-10, 0x1.8p-11, 3.0, 0.1, 1e5, 1e-42, full_nan})
        run(RC_PREMUL_SUM, 1, factor);
    for (float partner : {0.f, -0.f, 1.f, -1.f, 0x1p-24f, 0x1.8p-24f, 1024.f, 65504.f, 1e38f, 1e-40f, INFINITY, NAN}) {
        inputs[1].assign(1 << 16, D::encode(partner));
        for (int op : {RC_SUM, RC_PROD, RC_MIN, RC_MAX, RC_AVG}) run(op, 2, 1);
    }
    for (auto& x : inputs[1]) x = static_cast<uint16_t>(random_bits());
    for (int op : {RC_SUM, RC_PROD, RC_MIN, RC_MAX, RC_AVG}) run(op, 2, 1);
}

void check_copies() {
    std::vector<char> source(6000);
    for (char& byte : source) byte = static_cast<char>(random_bits());
    for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 200, 1000, 5001})
        for (size_t to : {0, 1, 8, 31, 32, 63, 64})
            for (size_t from : {0, 1, 3, 16, 33, 63}) {
                std::vector<char> target(bytes + 200), streamed(bytes + 200), expected(bytes + 200);
                std::memcpy(expected.data() + to, source.data() + from, bytes);
                kernels().copy(target.data() + to, source.data() + from, bytes);
                kernels().copy_nontemporal(streamed.data() + to, source.data() + from, bytes);
                expect(target == expected && streamed == expected, [&] {
                    return "a copy of " + std::to_string(bytes) + " bytes from +" + std::to_string(from) + " to +" +
                           std::to_string(to);
                });
            }
}

template <int... Dtypes>
void check_dtypes(const std::vector<std::string>& levels, std::integer_sequence<int, Dtypes...>) {
    const auto check_one = [&]<int Dtype>() {
        if constexpr (requires { sizeof(Spec<Dtype>); })
            check_dtype<Dtype>(levels);
        else
            for (int op = 0; op < RC_OPS; ++op)
                expect(!reducible(Dtype, op), "a dtype that only GPUs reduce is reduced");
    };
    (check_one.template operator()<Dtypes>(), ...);
}

}  // namespace

int main() {
    const std::string best = kernels().name;
    std::vector<std::string> levels;
    for (const char* level : {"portable", "avx2", "avx512", "neon"})
        if (select_kernels(level)) {
            expect(kernels().name == std::string(level), "select_kernels gave another level");
            levels.push_back(level);
        }
    expect(best == levels.back(), "the first level is not the best one");
    expect(!select_kernels("mmx") && kernels().name == levels.back(), "an unknown level was taken");
    expect(select_kernels("") && kernels().name == best, "no name is not the best level");

    check_dtypes(levels, std::make_integer_sequence<int, RC_DTYPES>());
    check_all_patterns<RC_FLOAT16>(levels);
    check_all_patterns<RC_BFLOAT16>(levels);
    for (const auto& level : levels) {
        select_kernels(level.c_str());
        check_copies();
    }
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
