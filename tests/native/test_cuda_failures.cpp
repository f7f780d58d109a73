// How calls on the emulated device are given up: who is named, why, and what stays as it was.
#include <functional>

#include "emulated_world.h"

using namespace gpu;

namespace {

struct Fate {
    Reason reason;
    int peer;
};

constexpr uint64_t NUMBER = 4711;  // of the call, as a host counts

void expect_fate(const World& world, int rank, Fate fate, const char* what) {
    const Record& record = world.control[rank].record;
    expect(world.control[rank].failed && record.reason == fate.reason && record.peer == fate.peer,
           std::string(what) + ": rank " + std::to_string(rank) + " has reason " + std::to_string(record.reason) +
               ", peer " + std::to_string(record.peer));
    expect(record.call == NUMBER, "the number of a call that was given up");
}

// A world, and what its ranks call: a collective, or messages from rank to rank.
struct Scene {
    World world;
    std::vector<Memory> memory;
    std::vector<gpu::Args> calls;

    Scene(const Shape& shape, int kernel, uint64_t count, double seconds) : world(shape) {
        for (int r = 0; r < shape.ranks; ++r) {
            memory.emplace_back(4096);
            calls.push_back(kernel == MESSAGE ? world.message(r, count) : world.args(r, kernel, INT32, SUM, count));
            calls[r].input = calls[r].output = memory[r].data();
            calls[r].timeout_ns = static_cast<uint64_t>(seconds * 1e9);
            calls[r].call = NUMBER;
        }
    }

    void expect_untouched(const char* what) const {
        for (const Memory& m : memory) expect(m.bytes == m.before, what);
    }
};

void check_who_never_arrives() {
    for (int kernel = 0; kernel < MESSAGE; ++kernel) {
        Scene scene(tiny_shape(3), kernel, 20, 0.05);
        scene.calls.pop_back();
        scene.world.launch(scene.calls, 2);
        for (int r = 0; r < 2; ++r) expect_fate(scene.world, r, {NOT_STARTED, 2}, "a rank never arrives");
        scene.expect_untouched("outputs of a call that never began");
        // The next kernel finds the rank broken: it says nothing to anybody.
        uint64_t* said = scene.world.arena(1).channel(0).start(COLLECTIVE, 1, 0);
        expect(*said, "a rank did not say what it calls");
        *said = 0;
        scene.world.launch(scene.calls, 2);
        expect(!*said, "a broken rank has spoken");
    }
}

void check_who_differs() {
    const auto differ = [](int kernel, const std::function<void(gpu::Args&)>& change) {
        Scene scene(tiny_shape(3), kernel, 20, 60);
        change(scene.calls[2]);
        scene.world.launch(scene.calls, 1);
        expect_fate(scene.world, 0, {MISMATCH, 2}, "a rank differs");
        expect_fate(scene.world, 1, {MISMATCH, 2}, "a rank differs");
        expect(scene.world.control[2].record.reason == MISMATCH, "the rank that differs");
        scene.expect_untouched("outputs after a mismatch");
    };
    for (int kernel = 0; kernel < MESSAGE; ++kernel) {
        differ(kernel, [](gpu::Args& a) { a.dtype = UINT32; });
        differ(kernel, [](gpu::Args& a) { a.op = MAX; });
        differ(kernel, [](gpu::Args& a) { a.factor = 2; });
        differ(kernel, [&](gpu::Args& a) { a.kernel = kernel == BARRIER ? LL : BARRIER; });
        if (kernel != BARRIER) differ(kernel, [](gpu::Args& a) { a.count = 21; });
    }
    for (int kernel : {RING_BROADCAST, RING_REDUCE, GATHER, SCATTER}) differ(kernel, [](gpu::Args& a) { a.root = 1; });
}

// Rank 2 is played by hand: it starts, and then takes nothing of what comes along the chain 0, 1, 2.
void check_who_stops(bool abort) {
    Scene scene(tiny_shape(3, 1), RING_BROADCAST, 1000, abort ? 60 : 0.2);
    World& world = scene.world;
    if (abort) scene.calls[0].timeout_ns = 200'000'000;
    scene.calls.pop_back();
    std::thread hand([&] {
        const Arena arena = world.arena(2);
        const Channel mine = arena.channel(0);
        uint64_t word;
        while (!(word = load_acquire(mine.start(COLLECTIVE, 1, 0)))) std::this_thread::yield();
        for (int p = 0; p < 2; ++p) store_release<SITE_START>(world.arena(p).channel(0).start(COLLECTIVE, 1, 2), word);
        while (load_acquire(mine.arrived(BETWEEN_ALL, 1)) < STEPS + 3) std::this_thread::yield();
        if (abort) store_relaxed(&world.control[1].abort, uint64_t(1));
    });
    world.launch(scene.calls, 1);
    hand.join();
    expect_fate(world, 0, {NO_ROOM, 1}, "a rank stops");
    expect_fate(world, 1, {abort ? ABORTED : NO_ROOM, 2}, "a rank stops");
    expect(world.control[1].record.got == 0 && world.control[1].record.expected == STEPS + 1, "what was waited for");
    expect(*world.arena(2).channel(0).arrived(BETWEEN_ALL, 1) == STEPS + 3, "slots without room were filled");
}

// ---- Messages: only the two ranks of one take part.

void check_whose_message_nobody_answers() {
    for (const int missing : {0, 1}) {
        Scene scene(tiny_shape(2), MESSAGE, 20, 0.05);
        scene.calls.erase(scene.calls.begin() + missing);
        scene.world.launch(scene.calls, 2);
        expect_fate(scene.world, 1 - missing, {NOT_STARTED, missing}, "nobody answers a message");
        scene.expect_untouched("the memory of a message that nobody answered");
    }
    Scene scene(tiny_shape(2), MESSAGE, 20, 0.05);
    scene.calls[1].kernel = BARRIER;
    scene.world.launch(scene.calls, 1);
    for (int r = 0; r < 2; ++r) expect_fate(scene.world, r, {NOT_STARTED, 1 - r}, "a message meets a collective");
    scene.expect_untouched("the memory of a message that met a collective");
}

// Ranks 0 and 1 disagree on their message; so nothing comes from rank 1 to rank 2, which agrees with it.
void check_whose_message_differs() {
    const auto differ = [](const std::function<void(gpu::Args&)>& change) {
        Scene scene(tiny_shape(3), MESSAGE, 20, 60);
        change(scene.calls[0]);
        scene.calls[2].timeout_ns = 50'000'000;
        scene.world.launch(scene.calls, 1);
        expect_fate(scene.world, 0, {MISMATCH, 1}, "a message differs");
        expect_fate(scene.world, 1, {MISMATCH, 0}, "a message differs");
        expect_fate(scene.world, 2, {NO_DATA, 1}, "the message of a rank that has a mismatch");
        scene.expect_untouched("memory after messages that differ");
    };
    differ([](gpu::Args& a) { a.count = 21; });
    differ([](gpu::Args& a) { a.dtype = UINT32; });
}

// One of two ranks is played by hand: it answers, and then sends nothing, or takes nothing.
void check_whose_message_stops(int stops, bool abort) {
    Scene scene(tiny_shape(2, 1), MESSAGE, 1000, abort ? 60 : 0.1);
    World& world = scene.world;
    const int other = 1 - stops;
    const Lane says = stops ? GRANT : OFFER, hears = stops ? OFFER : GRANT;
    scene.calls.erase(scene.calls.begin() + stops);
    std::thread hand([&] {
        const Arena here = world.arena(stops), there = world.arena(other);
        uint64_t word;
        while (!(word = load_acquire(here.channel(0).start(hears, 1, other)))) std::this_thread::yield();
        store_release<SITE_START>(there.channel(0).start(says, 1, stops), word);
        if (stops)
            while (load_acquire(here.channel(0).arrived(BETWEEN_TWO, other)) < STEPS + 3) std::this_thread::yield();
        if (abort) store_relaxed(&world.control[other].abort, uint64_t(1));
    });
    world.launch(scene.calls, 1);
    hand.join();
    const Record& record = world.control[other].record;
    expect_fate(world, other, {abort ? ABORTED : stops ? NO_ROOM : NO_DATA, stops}, "a message stops");
    if (stops)
        expect(*world.arena(1).channel(0).arrived(BETWEEN_TWO, 0) == STEPS + 3, "slots of a message without room");
    if (!abort) expect(record.got == 0 && record.expected == STEPS + 1, "what a message waited for");
    scene.expect_untouched("memory of a message that stopped");
}

void check_refusals() {
    const Shape smallest = tiny_shape(3);
    expect(valid(smallest), "the smallest shape");
    for (uint32_t Shape::* field : {&Shape::slots, &Shape::slot_bytes, &Shape::stage_bytes, &Shape::line_bytes}) {
        Shape shape = smallest;
        --(shape.*field);
        expect(!valid(shape), "a shape that cannot be");
    }
    World world(tiny_shape(1));
    const gpu::Args refused[] = {world.args(0, KERNELS, INT32, SUM, 0), world.args(0, LL, FLOAT32, BAND, 0),
                                 world.args(0, LL, COMPLEX64, MAX, 0), world.args(0, LL, INT32, AVG, 0)};
    for (const gpu::Args& args : refused)
        expect(rc_emulated_launch(&args, 1, 1, 0) == RC_ARGUMENT, "a kernel that there is not");
    const gpu::Args wide = world.args(0, LL, INT32, SUM, 0);
    expect(rc_emulated_launch(&wide, 3, 1, 0) == RC_ARGUMENT, "more blocks than channels");
    const gpu::Args unlike[] = {wide, world.args(0, LL, INT32, MAX, 0)};
    expect(rc_emulated_virtual(unlike, 2, 1, 1, 0) == RC_ARGUMENT, "two kernels in one grid");
}

}  // namespace

int main() {
    check_who_never_arrives();
    check_who_differs();
    check_who_stops(false);
    check_who_stops(true);
    check_whose_message_nobody_answers();
    check_whose_message_differs();
    for (const int stops : {0, 1})
        for (const bool abort : {false, true}) check_whose_message_stops(stops, abort);
    check_refusals();
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
