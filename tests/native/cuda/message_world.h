// A world of emulated GPUs for messages: an arena for each rank.
#pragma once

#include <atomic>
#include <memory>

#include "emulated_world.h"

struct MessageWorld {
    const gpu::MessageShape shape;
    const gpu::MessageLayout layout;
    std::vector<gpu::byte*> memory;
    std::vector<gpu::Control> control;
    std::atomic<uint64_t> launches{0};
    uint64_t seed = 0;
    int threads = 2;
    double seconds = 60;

    explicit MessageWorld(const gpu::MessageShape& shape)
        : shape(shape), layout(gpu::layout_of(shape)), control(shape.ranks) {
        expect(valid(shape), "the shape of a world");
        for (int r = 0; r < shape.ranks; ++r) {
            memory.push_back(static_cast<gpu::byte*>(aligned_alloc(128, layout.bytes)));
            memset(memory[r], 0, layout.bytes);
        }
    }
    MessageWorld(const MessageWorld&) = delete;
    ~MessageWorld() {
        for (gpu::byte* m : memory) free(m);
    }

    gpu::MessageArena arena(int rank) const { return {memory[rank], layout}; }

    uint64_t released(int rank, int slot) const { return *arena(rank).released(memory[rank], slot); }

    // One end of a message of rank `rank`, in a slot of the sender.
    gpu::MessageTransfer transfer(int rank, gpu::MessageKind kind, int peer, gpu::byte* data, uint64_t bytes,
                                  uint64_t number, int slot = 0, uint64_t before = 0) {
        gpu::MessageTransfer t{};
        t.kind = kind;
        t.peer = peer;
        t.data = data;
        t.bytes = bytes;
        t.number = number;
        t.slot = slot;
        t.before = before;
        t.arena = memory[kind == gpu::STAGE ? rank : peer];
        return t;
    }

    gpu::MessageArgs args(int rank, const std::vector<gpu::MessageTransfer>& transfers) {
        gpu::MessageArgs a{};
        a.arena = arena(rank);
        a.control = &control[rank];
        a.call = ++launches;
        a.launch = static_cast<int>(a.call % gpu::MAX_LAUNCHES);
        a.timeout_ns = static_cast<uint64_t>(seconds * 1e9);
        a.rank = rank;
        a.count = static_cast<int>(transfers.size());
        std::copy(transfers.begin(), transfers.end(), a.transfers);
        return a;
    }

    void launch(gpu::MessageArgs args) {
        const int blocks = gpu::plan_messages(args);
        if (const char* why = gpu::refusal(args, blocks)) return expect(false, why);
        ringcomm::launch_emulated(args, blocks, threads, seed);
    }

    void launch(int rank, const std::vector<gpu::MessageTransfer>& transfers) {
        gpu::MessageArgs a = args(rank, transfers);
        uint64_t completed = 0;
        a.completed = &completed;
        launch(a);
        expect(completed == a.call, "a launch did not complete");
    }

    // Each rank on a thread of its own.
    template <class Host>
    void on_all_ranks(Host host) {
        std::vector<std::thread> hosts;
        for (int r = 0; r < shape.ranks; ++r) hosts.emplace_back([&, r] { host(r); });
        for (auto& thread : hosts) thread.join();
    }
};
