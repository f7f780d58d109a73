// Failing calls on the emulated device: which rank is named, why, and what stays untouched.
#include <functional>

#include "emulated_world.h"

using namespace gpu;

namespace {

struct Failure {
    Reason reason;
    int peer;
};

constexpr uint64_t NUMBER = 4711;  // of the call, as a host counts

void expect_failure(const World& world, int rank, Failure failure, const char* what) {
    const KernelFailure& found = world.control[rank].failure;
    expect(world.control[rank].failed && found.reason == failure.reason && found.peer == failure.peer,
           std::string(what) + ": rank " + std::to_string(rank) + " has reason " + std::to_string(found.reason) +
               ", peer " + std::to_string(found.peer));
    expect(found.call == NUMBER, "the number of the failed call");
    expect(world.control[rank].completed == NUMBER, "a failed call has ended");
}

// A world, and the calls of its ranks.
struct Scene {
    World world;
    std::vector<Memory> memory;
    std::vector<gpu::Args> calls;

    Scene(const Shape& shape, int kernel, uint64_t count, double seconds) : world(shape) {
        for (int r = 0; r < shape.ranks; ++r) {
            memory.emplace_back(4096);
            calls.push_back(world.args(r, kernel, INT32, SUM, count));
            calls[r].input = calls[r].output = memory[r].data();
            calls[r].timeout_ns = static_cast<uint64_t>(seconds * 1e9);
            calls[r].call = NUMBER;
        }
    }

    void expect_untouched(const char* what) const {
        for (const Memory& m : memory) expect(m.bytes == m.before, what);
    }
};

void check_missing_rank() {
    for (int kernel = 0; kernel < KERNELS; ++kernel) {
        Scene scene(tiny_shape(3), kernel, 20, 0.05);
        scene.calls.pop_back();
        scene.world.launch(scene.calls, 2);
        for (int r = 0; r < 2; ++r) expect_failure(scene.world, r, {NOT_STARTED, 2}, "a missing rank");
        scene.expect_untouched("outputs of a call that did not start");
        // The next kernel finds the rank broken and signals nothing.
        uint64_t* start = scene.world.arena(1).channel(0).start(1, 0);
        expect(*start, "a rank did not signal its start");
        *start = 0;
        scene.world.launch(scene.calls, 2);
        expect(!*start, "a broken rank signaled a start");
    }
}

void check_mismatch() {
    const auto differ = [](int kernel, const std::function<void(gpu::Args&)>& change) {
        Scene scene(tiny_shape(3), kernel, 20, 60);
        change(scene.calls[2]);
        scene.world.launch(scene.calls, 1);
        for (int r = 0; r < 2; ++r) expect_failure(scene.world, r, {MISMATCH, 2}, "a rank differs");
        expect(scene.world.control[2].failure.reason == MISMATCH, "the rank that differs");
        scene.expect_untouched("outputs after a mismatch");
    };
    for (int kernel = 0; kernel < KERNELS; ++kernel) {
        differ(kernel, [](gpu::Args& a) { a.dtype = UINT32; });
        differ(kernel, [](gpu::Args& a) { a.op = MAX; });
        differ(kernel, [](gpu::Args& a) { a.factor = 2; });
        differ(kernel, [&](gpu::Args& a) { a.kernel = kernel == BARRIER ? LL : BARRIER; });
        if (kernel != BARRIER) differ(kernel, [](gpu::Args& a) { a.count = 21; });
    }
    for (int kernel : {RING_BROADCAST, RING_REDUCE, GATHER, SCATTER}) differ(kernel, [](gpu::Args& a) { a.root = 1; });
}

// The test plays rank 2: it starts the broadcast 0 → 1 → 2, and never releases a slot.
void check_stalled_rank(bool abort) {
    Scene scene(tiny_shape(3, 1), RING_BROADCAST, 1000, abort ? 60 : 0.2);
    World& world = scene.world;
    if (abort) scene.calls[0].timeout_ns = 200'000'000;
    scene.calls.pop_back();
    std::thread stalled([&] {
        const Channel mine = world.arena(2).channel(0);
        uint64_t word;
        while (!(word = load_acquire(mine.start(1, 0)))) std::this_thread::yield();
        for (int p = 0; p < 2; ++p) store_release<SITE_START>(world.arena(p).channel(0).start(1, 2), word);
        while (load_acquire(mine.tail(1)) < STEPS + 3) std::this_thread::yield();
        if (abort) store_relaxed(&world.control[1].abort, uint64_t(1));
    });
    world.launch(scene.calls, 1);
    stalled.join();
    expect_failure(world, 0, {NO_SLOT, 1}, "a rank stalls");
    expect_failure(world, 1, {abort ? ABORTED : NO_SLOT, 2}, "a rank stalls");
    expect(world.control[1].failure.got == 0 && world.control[1].failure.expected == STEPS + 1, "the expected flag");
    expect(*world.arena(2).channel(0).tail(1) == STEPS + 3, "slots were overwritten");
}

// The test plays rank 1 of an all_to_all: it starts with what it stages, and then sends nothing, or releases nothing.
void check_stalled_peer(bool sends, bool abort) {
    Scene scene(tiny_shape(2, 1), ALL_TO_ALL, 500, abort ? 60 : 0.1);
    World& world = scene.world;
    scene.calls.pop_back();
    const uint64_t sent = STEPS + (sends ? 3 : LAG);  // until rank 0 waits
    Memory& memory = scene.memory[0];
    constexpr int STAGED = 0xEE;
    std::thread stalled([&] {
        const Channel mine = world.arena(1).channel(0), theirs = world.arena(0).channel(0);
        uint64_t word;
        while (!(word = load_acquire(mine.start(1, 0)))) std::this_thread::yield();
        memset(theirs.stage(1, 1), STAGED, world.shape.stage_bytes);
        store_release<SITE_START>(theirs.start(1, 1), word);
        if (sends) store_release<SITE_TAIL>(theirs.tail(1), STEPS + 3);
        while (load_acquire(mine.tail(0)) < sent) std::this_thread::yield();
        if (abort) store_relaxed(&world.control[0].abort, uint64_t(1));
    });
    world.launch(scene.calls, 1);
    stalled.join();
    const KernelFailure& found = world.control[0].failure;
    expect_failure(world, 0, {abort ? ABORTED : sends ? NO_SLOT : NO_DATA, 1}, "a peer stalls");
    expect(found.got == 0 && found.expected == STEPS + 1, "the expected flag");
    expect(*world.arena(1).channel(0).tail(0) == sent, "slots were overwritten");
    if (sends) return;
    const uint64_t block = memory.begin + 500 * sizeof(int32_t);
    std::fill_n(memory.before.begin() + block, world.shape.stage_bytes, STAGED);
    scene.expect_untouched("the memory of a rank that received only what was staged");
}

void check_refusals() {
    const Shape smallest = tiny_shape(3);
    expect(valid(smallest), "the smallest shape");
    for (uint32_t Shape::* field : {&Shape::slots, &Shape::slot_bytes, &Shape::stage_bytes, &Shape::line_bytes}) {
        Shape shape = smallest;
        --(shape.*field);
        expect(!valid(shape), "an invalid shape");
    }
    World world(tiny_shape(1));
    const gpu::Args refused[] = {world.args(0, KERNELS, INT32, SUM, 0), world.args(0, LL, FLOAT32, BAND, 0),
                                 world.args(0, LL, COMPLEX64, MAX, 0), world.args(0, LL, BOOL, AVG, 0)};
    for (const gpu::Args& args : refused) expect(refusal({&args, 1}, 1), "an unknown kernel");
    const gpu::Args ll = world.args(0, LL, INT32, SUM, 0);
    expect(refusal({&ll, 1}, 3), "more blocks than channels");
    const gpu::Args different[] = {ll, world.args(0, LL, INT32, MAX, 0)};
    expect(refusal(different, 1), "two kernels in one grid");
}

}  // namespace

int main() {
    check_missing_rank();
    check_mismatch();
    for (const bool abort : {false, true}) check_stalled_rank(abort);
    for (const bool sends : {false, true})
        for (const bool abort : {false, true}) check_stalled_peer(sends, abort);
    check_refusals();
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
