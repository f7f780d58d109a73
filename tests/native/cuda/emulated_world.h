// A world of emulated GPUs: an arena for each rank, and launches on all of them.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bindings/emulated_cuda/kernels.h"
#include "ringcomm.h"

namespace gpu = ringcomm::cuda;

inline int failures = 0;

inline void expect(bool holds, const std::string& what) {
    if (!holds && ++failures <= 20) std::printf("FAILED %s\n", what.c_str());
}

inline std::mt19937_64 random_bits(20240229);

struct World {
    const gpu::Shape shape;
    gpu::ArenaLayout layout;
    std::vector<gpu::byte*> memory;
    std::vector<gpu::DeviceArena> arenas;
    std::vector<gpu::Control> control;
    uint64_t seed = 0;
    int threads = 2;
    bool one_grid = false;           // all ranks in one launch
    std::function<void(int)> after;  // called for each rank when its own launch has ended

    explicit World(const gpu::Shape& shape) : shape(shape), memory(shape.ranks), control(shape.ranks) {
        layout = gpu::layout_of(shape);
        for (int r = 0; r < shape.ranks; ++r) {
            memory[r] = static_cast<gpu::byte*>(aligned_alloc(128, layout.bytes));
            memset(memory[r], 0, layout.bytes);
            arenas.push_back({memory[r], layout});
        }
        for (int r = 0; r < shape.ranks; ++r) memcpy(arena(r).peers(), memory.data(), shape.ranks * sizeof(void*));
    }
    World(const World&) = delete;
    ~World() {
        for (gpu::byte* m : memory) free(m);
    }

    const gpu::DeviceArena& arena(int rank) const { return arenas[rank]; }

    void set_epoch(uint64_t epoch) {
        for (int r = 0; r < shape.ranks; ++r)
            for (int c = 0; c < shape.channels; ++c) *arena(r).channel(c).epoch() = epoch;
    }

    gpu::Args args(int rank, int kernel, int dtype, int op, uint64_t count) {
        gpu::Args a{};
        a.arena = arena(rank);
        a.control = &control[rank];
        a.timeout_ns = 60'000'000'000;
        a.rank = rank;
        a.kernel = kernel;
        a.dtype = dtype;
        a.op = op;
        a.count = count;
        a.factor = 1;
        return a;
    }

    void launch(const std::vector<gpu::Args>& calls, int blocks) {
        if (one_grid) return ringcomm::launch_emulated(calls, blocks, threads, seed);
        std::vector<std::thread> ranks;
        for (const gpu::Args& call : calls)
            ranks.emplace_back([&] {
                ringcomm::launch_emulated({&call, 1}, blocks, threads, seed);
                if (after) after(call.rank);
            });
        for (auto& rank : ranks) rank.join();
    }
};

// The smallest slots: little data passes through them many times.
inline gpu::Shape tiny_shape(int ranks, int channels = 2) { return {ranks, channels, 3, 16u * ranks, 32, 16}; }

// Bytes at any alignment, with margins that must stay untouched.
struct Memory {
    static constexpr size_t margin = 64;
    std::vector<gpu::byte> bytes, before;
    size_t begin;

    explicit Memory(size_t size, size_t shift = random_bits() % 4 ? random_bits() % 16 : 0) : bytes(size + 2 * margin) {
        begin = margin / 2;
        while (reinterpret_cast<uintptr_t>(&bytes[begin]) % 16 != shift) ++begin;
        for (gpu::byte& b : bytes) b = static_cast<gpu::byte>(random_bits());
        before = bytes;
    }
    gpu::byte* data() { return &bytes[begin]; }
    bool margins_hold(size_t size) const {
        return std::equal(bytes.begin(), bytes.begin() + begin, before.begin()) &&
               std::equal(bytes.begin() + begin + size, bytes.end(), before.begin() + begin + size);
    }
};
