// Groups of GPUs on the emulated driver, which this program exports itself: calls on several streams and threads,
// their order, the watching thread, a peer that does not call.
#include <array>
#include <cstring>
#include <memory>
#include <random>

#include "bindings/emulated_cuda/functions.h"
#include "kernels/cuda/kernels.cuh"
#include "world.h"

using namespace ringcomm::cu;
namespace gpu = ringcomm::cuda;

namespace {

constexpr int RANKS = 3, STREAMS = 3, CALLS = 300;
constexpr rc_cuda_shape SHAPE{RANKS, 2, 3, 16 * RANKS, 64, 32};
constexpr const char* THIS_PROGRAM = "";  // as dlopen takes it

struct Freed {
    void operator()(void* memory) const { free(memory); }
};

using Arenas = std::array<std::unique_ptr<void, Freed>, RANKS>;  // which peers may write to as long as any kernel runs

// What Python makes for a rank.
class Gpu {
public:
    Gpu(rc_comm* comm, int rank, Arenas& arenas) : rank(rank) {
        DO(cuInit(0));
        CUdevice device;
        CUcontext context;
        DO(cuDeviceGet(&device, 0));
        DO(cuDevicePrimaryCtxRetain(&context, device));
        DO(cuCtxPushCurrent_v2(context));
        for (CUstream& stream : streams) DO(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
        CUmodule module;
        DO(cuModuleLoadData(&module, "any"));
        DO(cuModuleGetFunction(&kernel, module, "ringcomm_kernel"));

        uint64_t bytes, peers_at;
        DO(rc_cuda_layout(&SHAPE, &bytes, &peers_at));
        arenas[rank].reset(aligned_alloc(128, bytes));
        void* mine = arenas[rank].get();
        memset(mine, 0, bytes);
        const rc_call exchange{&mine,  static_cast<char*>(mine) + peers_at, sizeof mine, RC_UINT8, 0, 1.0, 0, nullptr,
                               nullptr};
        DO(rc_collective(comm, RC_ALL_GATHER, &exchange, -1, nullptr));
        tables.resize(rc_gpus_table_bytes(RANKS) / sizeof(uint64_t));
        const rc_gpus_setup setup{SHAPE, {}, mine, &control, tables.data(), context, THIS_PROGRAM, "emulated", 2};
        DO(rc_gpus_open(comm, &setup, &group));
        watching = std::thread([this] {
            int stopped = 0;
            while (!rc_gpus_watch(group, &stopped) && !stopped) ++events;
        });
    }

    ~Gpu() {
        DO(rc_gpus_stop(group));
        watching.join();
        rc_gpus_free(group);
        for (CUstream stream : streams) DO(cuStreamDestroy_v2(stream));
    }

    // Launches an all_reduce of integers in place.
    int all_reduce(int* data, uint64_t count, CUstream stream, int mode, uint64_t* number, double timeout = -1) {
        const rc_call call{data, data, count, RC_INT32, RC_SUM, 1.0, 0, nullptr, nullptr};
        for (;;) {
            const int status = rc_gpus_call(group, RC_ALL_REDUCE, &call, stream, timeout, mode, number);
            rc_cuda_plan plan;
            int loaded;
            if (status != RC_UNPREPARED) return status;
            DO(rc_gpus_plan(group, RC_ALL_REDUCE, &call, -1, &plan, &loaded));
            if (loaded) return status;
            DO(rc_gpus_load(group, &plan, kernel));
        }
    }

    const int rank;
    CUstream streams[STREAMS];
    CUfunction kernel;
    rc_cuda_control control{};
    std::vector<uint64_t> tables;
    rc_gpus* group = nullptr;
    std::thread watching;
    std::atomic<int> events{0};
};

// The same calls on all ranks; each rank chooses streams, modes and waits for itself.
void check_random_calls() {
    Arenas arenas;
    in_world(RANKS, small_tuning(), [&](rc_comm* comm, int rank) {
        Gpu gpu(comm, rank, arenas);
        std::mt19937 same(1), own(rank + 2);
        std::vector<std::vector<int>> arrays;
        std::atomic<bool> done{false};
        std::atomic<uint64_t> last{0};
        std::thread asking([&] {
            while (!done.load()) {
                char text[256];
                double timeout;
                int by_copy_engines;
                const uint64_t number = last.load();
                rc_gpus_ended(gpu.group, number);
                if (number) rc_gpus_describe(gpu.group, number, text, sizeof text, &timeout, &by_copy_engines);
                if (number) DO(rc_gpus_notify(gpu.group, number));
                std::this_thread::yield();
            }
        });
        for (int i = 0; i < CALLS; ++i) arrays.emplace_back(std::vector<int>(1 + same() % 100, rank + i));
        for (int i = 0; i < CALLS; ++i) {
            std::vector<int>& array = arrays[i];
            CUstream stream = gpu.streams[own() % STREAMS];
            const int mode = own() % 2 ? RC_GPUS_ASYNC : RC_GPUS_PLAIN;
            uint64_t number;
            DO(gpu.all_reduce(array.data(), array.size(), stream, mode, &number));
            last.store(number);
            CHECK(number == uint64_t(i) + 1);
            if (own() % 8 == 0 && mode == RC_GPUS_ASYNC) DO(rc_gpus_order(gpu.group, number, gpu.streams[0]));
            if (own() % 16 == 0) DO(rc_gpus_wait(gpu.group, number, -1));
        }
        DO(rc_gpus_wait(gpu.group, CALLS, -1));
        done.store(true);
        asking.join();
        for (int i = 0; i < CALLS; ++i)
            for (int value : arrays[i]) CHECK(value == RANKS * i + RANKS * (RANKS - 1) / 2);
        DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    });
}

void check_missing_peer() {
    Arenas arenas;
    in_world(RANKS, small_tuning(), [&](rc_comm* comm, int rank) {
        Gpu gpu(comm, rank, arenas);
        int value[1] = {rank};
        uint64_t number;
        if (rank != 2) {
            DO(gpu.all_reduce(value, 1, gpu.streams[0], RC_GPUS_PLAIN, &number, 0.2));
            DO(rc_gpus_wait(gpu.group, number, -1));  // the kernel ends by its own timeout
            while (!gpu.events.load()) std::this_thread::yield();
            CHECK(gpu.control.failed && gpu.control.number == number && gpu.control.peer == 2);
            CHECK(value[0] == rank);
            CHECK(gpu.all_reduce(value, 1, gpu.streams[0], RC_GPUS_PLAIN, &number) == RC_UNPREPARED);
        }
        DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));
    });
}

// A failure of the communicator ends a kernel that waits.
void check_abort() {
    Arenas arenas;
    std::atomic<int> launched{0}, ended{0};
    in_world(RANKS, small_tuning(), [&](rc_comm* comm, int rank) {
        Gpu gpu(comm, rank, arenas);
        int value[1] = {rank};
        uint64_t number;
        if (rank == 2) {
            while (launched.load() < 2) std::this_thread::yield();
            DO(rc_abort(comm, RC_ABORTED, rank, "enough"));
            while (ended.load() < 2) std::this_thread::yield();  // a rank that leaves would end them, too
            return;
        }
        DO(gpu.all_reduce(value, 1, gpu.streams[0], RC_GPUS_PLAIN, &number, 5.0));
        ++launched;
        while (!rc_gpus_ended(gpu.group, number)) std::this_thread::yield();  // the watching thread sees to that
        ++ended;
        CHECK(gpu.control.failed && gpu.control.reason == gpu::ABORTED);
        CHECK(rc_check(comm) == RC_ABORTED);
    });
}

}  // namespace

int main() {
    check_random_calls();
    check_missing_peer();
    check_abort();
    return failures ? 1 : 0;
}
