// The emulated driver by itself: streams, events, memory between processes, graphs, misuse, skipped launches.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <future>

#include "bindings/emulated_cuda/functions.h"
#include "emulated_world.h"

using namespace ringcomm::cu;

namespace {

void expect_result(CUresult got, CUresult expected, const char* what) {
    const char* name = "?";
    cuGetErrorName(got, &name);
    expect(got == expected, std::string(what) + ": " + (name ? name : std::to_string(got)));
}
#define EXPECT(expected, call) expect_result(call, expected, #call)
#define OK(call) EXPECT(CUDA_SUCCESS, call)

CUstream new_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream stream = nullptr;
    OK(cuStreamCreateWithPriority(&stream, flags, 0));
    return stream;
}

CUevent new_event(unsigned flags = 0) {
    CUevent event = nullptr;
    OK(cuEventCreate(&event, flags));
    return event;
}

// A step that ends when the test says so.
struct Gate {
    std::promise<void> promise;
    std::shared_future<void> opened = promise.get_future().share();
    void open() { promise.set_value(); }
    void block(CUstream stream) {
        OK(cuLaunchHostFunc(stream, [](void* data) { static_cast<Gate*>(data)->opened.wait(); }, this));
    }
};

// Steps that write down their numbers.
struct Log {
    std::mutex mutex;
    std::vector<int> seen;
    std::deque<std::pair<Log*, int>> entries;
    void add(CUstream stream, int number) {
        OK(cuLaunchHostFunc(
            stream,
            [](void* data) {
                auto& [log, number] = *static_cast<std::pair<Log*, int>*>(data);
                const std::lock_guard lock(log->mutex);
                log->seen.push_back(number);
            },
            &entries.emplace_back(this, number)));
    }
};

void check_start() {
    int count = 0, version = 0, value = 0;
    char name[16];
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    OK(cuDriverGetVersion(&version));
    OK(cuDeviceGetName(name, sizeof name, 0));
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    expect(count == 1 && version == 13000 && !strcmp(name, "emulated") && value == 9, "facts of the device");
    CUstream stream;
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuStreamCreateWithPriority(&stream, 0, 0));
    CUcontext primary, popped, current;
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    OK(cuCtxPushCurrent_v2(primary));
    OK(cuCtxPushCurrent_v2(primary));
    OK(cuCtxPopCurrent_v2(&popped));
    OK(cuCtxGetCurrent(&current));
    expect(popped == primary && current == primary, "the stack of contexts");
    std::thread([] {
        CUcontext current;
        OK(cuCtxGetCurrent(&current));
        expect(!current, "each thread has its own current context");
    }).join();
}

void check_streams() {
    const CUstream a = new_stream(), b = new_stream();
    Gate gate;
    Log log;
    gate.block(a);
    for (int i = 0; i < 100; ++i) log.add(a, i);
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
    log.add(b, 100);  // beside the other stream
    OK(cuStreamSynchronize(b));
    OK(cuStreamSynchronize(nullptr));
    OK(cuStreamSynchronize(STREAM_PER_THREAD));
    expect(log.seen == std::vector{100}, "streams run concurrently");
    gate.open();
    OK(cuStreamSynchronize(a));
    OK(cuStreamQuery(a));
    bool ordered = log.seen.size() == 101;
    for (int i = 0; ordered && i < 100; ++i) ordered = log.seen[i + 1] == i;
    expect(ordered, "the steps of a stream run in order");

    // From many threads at once, with short steps among them.
    char buffer[64];
    std::vector<std::thread> threads;
    CUcontext primary;
    OK(cuCtxGetCurrent(&primary));
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            OK(cuCtxSetCurrent(primary));
            Log own;
            for (int i = 0; i < 50; ++i) {
                own.add(a, i);
                OK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(buffer), t, sizeof buffer, a));
            }
            OK(cuStreamSynchronize(a));
            expect(own.seen.size() == 50 && std::is_sorted(own.seen.begin(), own.seen.end()), "steps of one thread");
        });
    for (auto& thread : threads) thread.join();
    for (const char byte : buffer) expect(byte == buffer[0], "memset");

    // A host function must not call the driver; a destroyed stream still runs what is queued.
    Gate before;
    std::promise<CUresult> inside;
    before.block(b);
    OK(cuLaunchHostFunc(
        b, [](void* data) { static_cast<std::promise<CUresult>*>(data)->set_value(cuStreamQuery(nullptr)); }, &inside));
    OK(cuStreamDestroy_v2(b));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(b));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy_v2(b));
    before.open();
    expect(inside.get_future().get() == CUDA_ERROR_NOT_PERMITTED, "a host function calls the driver");
    OK(cuStreamDestroy_v2(a));
}

void check_events() {
    const CUstream a = new_stream(), b = new_stream();
    const CUevent event = new_event(), later = new_event(), untimed = new_event(CU_EVENT_DISABLE_TIMING);
    float ms = -1;
    OK(cuEventQuery(event));  // never recorded: reached
    OK(cuEventSynchronize(event));
    OK(cuStreamWaitEvent(a, event, 0));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, event, event));

    // A wait is for the record at its time, and no later one.
    Gate first, second;
    Log log;
    first.block(a);
    OK(cuEventRecord(event, a));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    OK(cuStreamWaitEvent(b, event, 0));
    log.add(b, 1);
    second.block(a);
    OK(cuEventRecord(event, a));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
    first.open();
    OK(cuStreamSynchronize(b));
    expect(log.seen == std::vector{1}, "the wait ended with the first record");
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    OK(cuEventRecord(later, b));
    OK(cuEventQuery(later));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, later, event));
    OK(cuEventRecord(untimed, b));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, untimed, later));
    second.open();
    OK(cuEventSynchronize(event));
    OK(cuEventElapsedTime(&ms, later, event));
    expect(ms >= 0, "time passes");

    // A destroyed event ends no wait early.
    Gate third;
    third.block(a);
    OK(cuEventRecord(event, a));
    OK(cuStreamWaitEvent(b, event, 0));
    OK(cuEventDestroy_v2(event));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, a));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamWaitEvent(b, event, 0));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventDestroy_v2(event));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(reinterpret_cast<CUevent>(a)));
    third.open();
    OK(cuStreamSynchronize(b));
    OK(cuStreamDestroy_v2(a));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(later, a));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamWaitEvent(a, later, 0));
    OK(cuStreamDestroy_v2(b));
}

char* pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

void check_memory() {
    CUdeviceptr address = 0, opened = 0, again = 0;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&address, 0));
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&address, size_t{1} << 60));
    OK(cuMemAlloc_v2(&address, 10'000));
    void* pinned = nullptr;
    OK(cuMemHostAlloc(&pinned, 100, HOST_ALLOC_PORTABLE | HOST_ALLOC_DEVICEMAP));
    strcpy(static_cast<char*>(pinned), "text");
    OK(cuMemcpyAsync(address, reinterpret_cast<CUdeviceptr>(pinned), 5, nullptr));
    OK(cuStreamSynchronize(nullptr));
    CUipcMemHandle handle;
    OK(cuIpcGetMemHandle(&handle, address));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, address + 1));
    OK(cuIpcOpenMemHandle_v2(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cuIpcOpenMemHandle_v2(&again, handle, 0));
    expect(opened != address && opened == again && !strcmp(pointer(opened), "text"), "opened in this process");
    const pid_t child = fork();
    if (!child) {
        CUdeviceptr mine = 0;
        int device = -1;
        OK(cuIpcCloseMemHandle(opened));
        OK(cuIpcCloseMemHandle(opened));
        OK(cuIpcOpenMemHandle_v2(&mine, handle, 0));
        OK(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mine));
        expect(device == 0 && !strcmp(pointer(mine), "text"), "opened in a child");
        strcpy(pointer(mine), "child");
        OK(cuIpcCloseMemHandle(mine));
        _exit(failures);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, "the child");
    expect(!strcmp(pointer(address), "child"), "written by a child");
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(opened));
    OK(cuMemFree_v2(address));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
    expect(!strcmp(pointer(opened), "child"), "memory outlives its owner");
    OK(cuIpcCloseMemHandle(opened));
    OK(cuIpcCloseMemHandle(opened));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(opened));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&opened, handle, 0));  // freed
    OK(cuMemFreeHost(pinned));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pinned));
}

void check_virtual_memory() {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    const CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const auto type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t page = 0;
    OK(cuMemGetAllocationGranularity(&page, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    CUmemGenericAllocationHandle memory = 0, imported = 0;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&memory, page + 1, &wanted, 0));
    OK(cuMemCreate(&memory, page, &wanted, 0));
    int descriptor = -1;
    OK(cuMemExportToShareableHandle(&descriptor, memory, type, 0));
    void* const shareable = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    OK(cuMemImportFromShareableHandle(&imported, shareable, type));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(-1), type));
    close(descriptor);
    CUdeviceptr here = 0, there = 0;
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAddressReserve(&here, size_t{1} << 60, 0, 0, 0));
    OK(cuMemAddressReserve(&here, page, 0, 0, 0));
    OK(cuMemAddressReserve(&there, page, 0, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(here, page, &access, 1));  // nothing is mapped
    for (const auto& [address, handle] : {std::pair(here, memory), std::pair(there, imported)}) {
        OK(cuMemMap(address, page, 0, handle, 0));
        OK(cuMemSetAccess(address, page, &access, 1));
        OK(cuMemRelease(handle));  // mapped memory lives on
    }
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(memory));
    strcpy(pointer(here), "text");
    expect(here != there && !strcmp(pointer(there), "text"), "memory that is mapped twice");
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(here, page));  // mapped
    OK(cuMemUnmap(here, page));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(here, page));
    OK(cuMemAddressFree(here, page));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(here, page));
    expect(!strcmp(pointer(there), "text"), "memory that is still mapped");
    OK(cuMemUnmap(there, page));
    OK(cuMemAddressFree(there, page));
}

void check_graphs() {
    const CUstream a = new_stream(), b = new_stream();
    const CUevent fork = new_event(), join = new_event();
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    Log log;
    OK(cuStreamBeginCapture_v2(a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CUstreamCaptureStatus status;
    uint64_t id = 0, same = 0;
    log.add(a, 1);
    OK(cuEventRecord(fork, a));
    OK(cuStreamIsCapturing(b, &status));
    expect(status == CU_STREAM_CAPTURE_STATUS_NONE, "not yet joined");
    OK(cuStreamWaitEvent(b, fork, 0));
    OK(cuStreamGetCaptureInfo_v2(a, &status, &id, nullptr, nullptr, nullptr));
    OK(cuStreamGetCaptureInfo_v2(b, &status, &same, nullptr, nullptr, nullptr));
    expect(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && id && id == same, "joined");
    log.add(b, 2);
    log.add(a, 3);
    OK(cuEventRecord(join, b));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(b, &graph));
    OK(cuStreamWaitEvent(a, join, 0));
    log.add(a, 4);
    OK(cuStreamEndCapture(a, &graph));
    expect(log.seen.empty(), "a capture runs nothing");
    OK(cuStreamIsCapturing(b, &status));
    expect(status == CU_STREAM_CAPTURE_STATUS_NONE, "the capture has ended");
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    OK(cuGraphDestroy(graph));
    for (int i = 0; i < 2; ++i) OK(cuGraphLaunch(executable, b));
    OK(cuGraphExecDestroy(executable));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuGraphLaunch(executable, b));
    OK(cuStreamSynchronize(b));
    expect(log.seen == std::vector{1, 2, 3, 4, 1, 2, 3, 4}, "two replays");
    EXPECT(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(join));  // until it is recorded again
    OK(cuEventRecord(join, b));
    OK(cuEventSynchronize(join));

    // What a capture does not allow invalidates it.
    const auto refused = [&](CUresult expected, auto call, CUstream stream, CUstreamCaptureMode mode) {
        OK(cuStreamBeginCapture_v2(stream, mode));
        log.add(stream, 0);
        OK(cuEventRecord(fork, stream));
        expect_result(call(), expected, "in a capture");
        const bool broken = expected != CUDA_SUCCESS;
        EXPECT(broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, cuEventRecord(fork, stream));
        EXPECT(broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, cuStreamEndCapture(stream, &graph));
        expect(broken == !graph, "a graph only of a good capture");
        if (graph) OK(cuGraphDestroy(graph));
    };
    const auto global = CU_STREAM_CAPTURE_MODE_GLOBAL, relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    const CUevent other = new_event();
    OK(cuEventRecord(other, b));
    const auto query = [&] { return cuEventQuery(other); };
    refused(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuStreamSynchronize(a); }, a, relaxed);
    refused(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuStreamQuery(a); }, a, relaxed);
    refused(CUDA_ERROR_CAPTURED_EVENT, [&] { return cuEventQuery(fork); }, a, relaxed);
    refused(CUDA_ERROR_CAPTURED_EVENT, [&] { return cuEventSynchronize(fork); }, a, relaxed);
    refused(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, [&] { return cuStreamWaitEvent(a, other, 0); }, a, relaxed);
    refused(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, query, a, global);
    refused(CUDA_SUCCESS, query, a, relaxed);
    const auto elsewhere = [&](CUstreamCaptureMode mode) {
        return [&, mode] {
            return std::async(std::launch::async,
                              [&, mode = mode] {
                                  CUcontext primary;
                                  OK(cuDevicePrimaryCtxRetain(&primary, 0));
                                  OK(cuCtxSetCurrent(primary));
                                  CUstreamCaptureMode exchanged = mode;
                                  OK(cuThreadExchangeStreamCaptureMode(&exchanged));
                                  return query();
                              })
                .get();
        };
    };
    refused(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, elsewhere(global), a, global);
    refused(CUDA_SUCCESS, elsewhere(relaxed), a, global);
    refused(CUDA_SUCCESS, elsewhere(global), a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);

    // The legacy stream, while a stream captures that waits for it.
    const CUstream blocking = new_stream(0);
    refused(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, [&] { return cuEventRecord(other, nullptr); }, blocking, relaxed);
    refused(CUDA_SUCCESS, [&] { return cuEventRecord(other, nullptr); }, a, relaxed);
    OK(cuStreamBeginCapture_v2(blocking, relaxed));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuStreamIsCapturing(nullptr, &status));
    OK(cuStreamEndCapture(blocking, &graph));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(nullptr, relaxed));

    // Work that the origin does not wait for; captures that meet.
    OK(cuStreamBeginCapture_v2(a, relaxed));
    OK(cuEventRecord(fork, a));
    OK(cuStreamWaitEvent(b, fork, 0));
    log.add(b, 0);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(a, &graph));
    OK(cuStreamBeginCapture_v2(a, relaxed));
    OK(cuStreamBeginCapture_v2(b, relaxed));
    OK(cuEventRecord(fork, a));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_MERGE, cuStreamWaitEvent(b, fork, 0));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(a, &graph));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(b, &graph));
    EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(b, &graph));
}

struct Kernels {
    CUmodule module = nullptr;
    CUfunction one = nullptr, all = nullptr, other = nullptr;
    Kernels() {
        OK(cuModuleLoadData(&module, "any"));
        OK(cuModuleGetFunction(&one, module, "ringcomm_kernel"));
        OK(cuModuleGetFunction(&all, module, "ringcomm_virtual"));
        OK(cuModuleGetFunction(&other, module, "other"));
    }
};

CUresult launch(CUfunction function, gpu::Args args, int blocks, CUstream stream) {
    void* parameters[] = {&args};
    return cuLaunchKernel(function, blocks, 1, 1, 2, 1, 1, 0, stream, parameters, nullptr);
}

void check_launches() {
    constexpr int RANKS = 3, COUNT = 100;
    World world(tiny_shape(RANKS));
    Kernels kernels;
    std::vector<std::vector<int>> data(RANKS, std::vector<int>(COUNT));
    std::vector<gpu::Args> calls;
    std::vector<CUstream> streams;
    for (int r = 0; r < RANKS; ++r) {
        calls.push_back(world.args(r, gpu::RING_ALL_REDUCE, gpu::INT32, gpu::SUM, COUNT));
        calls[r].input = calls[r].output = reinterpret_cast<gpu::byte*>(data[r].data());
        streams.push_back(new_stream());
    }
    const auto expect_sums = [&](const char* what) {
        for (const auto& values : data)
            for (int i = 0; i < COUNT; ++i) expect(values[i] == RANKS * i, what);
    };
    const auto fill = [&] {
        for (auto& values : data)
            for (int i = 0; i < COUNT; ++i) values[i] = i;
    };
    fill();
    for (int r = 0; r < RANKS; ++r) {
        calls[r].call = 7;
        OK(launch(kernels.one, calls[r], 2, streams[r]));
    }
    for (const CUstream stream : streams) OK(cuStreamSynchronize(stream));
    expect_sums("a sum");
    for (const gpu::Control& control : world.control) expect(control.completed == 7, "the call has ended");

    fill();
    for (gpu::Args& call : calls) call.call = 8;
    gpu::VirtualRanks ranks{};
    std::copy(calls.begin(), calls.end(), ranks.of);
    int blocks = 2;
    void* parameters[] = {&ranks, &blocks};
    OK(cuLaunchCooperativeKernel(kernels.all, 2 * RANKS, 1, 1, 2, 1, 1, 0, streams[0], parameters));
    OK(cuStreamSynchronize(streams[0]));
    expect_sums("a sum in one grid");
    for (const gpu::Control& control : world.control) expect(control.completed == 8, "every rank's call has ended");

    // Captured: the arguments are those at the time of the capture; each replay counts.
    std::vector<CUgraphExec> executables(RANKS);
    for (int r = 0; r < RANKS; ++r) {
        CUgraph graph = nullptr;
        calls[r].call = gpu::CAPTURED | 9;
        OK(cuStreamBeginCapture_v2(streams[r], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        OK(launch(kernels.one, calls[r], 2, streams[r]));
        calls[r] = {};
        OK(cuStreamEndCapture(streams[r], &graph));
        OK(cuGraphInstantiateWithFlags(&executables[r], graph, 0));
        OK(cuGraphDestroy(graph));
    }
    for (int replay = 1; replay <= 3; ++replay) {
        fill();
        for (int r = 0; r < RANKS; ++r) OK(cuGraphLaunch(executables[r], streams[r]));
        for (const CUstream stream : streams) OK(cuStreamSynchronize(stream));
        expect_sums("a sum in a graph");
        for (const gpu::Control& control : world.control)
            expect(control.completed == 8 && control.replay_ended && control.replay_started == control.replay_ended &&
                       control.replay_ended == *world.arena(0).channel(0).epoch(),
                   "the replay has ended");
    }

    // What cannot run.
    gpu::Args wrong = world.args(0, gpu::KERNELS, gpu::INT32, gpu::SUM, 1);
    EXPECT(CUDA_ERROR_INVALID_VALUE, launch(kernels.one, wrong, 2, streams[0]));
    wrong.kernel = gpu::BARRIER;
    EXPECT(CUDA_ERROR_INVALID_VALUE, launch(kernels.one, wrong, 3, streams[0]));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, launch(kernels.other, wrong, 1, streams[0]));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, launch(nullptr, wrong, 1, streams[0]));
    EXPECT(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
           cuLaunchCooperativeKernel(kernels.all, 1000, 1, 1, 2, 1, 1, 0, streams[0], parameters));
}

void check_skipped() {
    World world(tiny_shape(2));
    Kernels kernels;
    const CUstream stream = new_stream();
    ringcomm_emulated_configure(0, 1, 0, 0);
    gpu::Args args = world.args(0, gpu::RING_ALL_REDUCE, gpu::INT32, gpu::SUM, 100);  // its peer does not come
    constexpr int CALLS = 100'000;
    const auto begin = std::chrono::steady_clock::now();
    for (args.call = 1; args.call <= CALLS; ++args.call) {
        void* parameters[] = {&args};
        if (cuLaunchKernel(kernels.one, 2, 1, 1, 2, 1, 1, 0, stream, parameters, nullptr)) expect(false, "skipped");
        if (world.control[0].completed != args.call) expect(false, "a skipped launch has ended at once");
    }
    const auto spent = std::chrono::steady_clock::now() - begin;
    std::printf("a skipped launch: %.0f ns\n", double(spent / std::chrono::nanoseconds(1)) / CALLS);
    Gate gate;
    gate.block(stream);
    OK(launch(kernels.one, args, 2, stream));
    expect(world.control[0].completed < args.call, "a skipped launch waits for its turn");
    gate.open();
    OK(cuStreamSynchronize(stream));
    expect(world.control[0].completed == args.call, "the skipped launch has ended");
    ringcomm_emulated_configure(0, 0, 0, 0);
}

void check_failure() {
    World world(tiny_shape(2));
    Kernels kernels;
    gpu::VirtualRanks ranks{};
    ranks.of[0] = world.args(0, gpu::BARRIER, gpu::INT32, gpu::SUM, 1);
    ranks.of[1] = world.args(1, gpu::RING_BROADCAST, gpu::INT32, gpu::SUM, 1);
    int blocks = 1;
    void* parameters[] = {&ranks, &blocks};
    const CUstream stream = new_stream();
    OK(cuLaunchKernel(kernels.all, 2, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
    EXPECT(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(stream));
    EXPECT(CUDA_ERROR_LAUNCH_FAILED, cuStreamQuery(nullptr));  // for good, as on a GPU
}

}  // namespace

int main() {
    check_start();
    check_streams();
    check_events();
    check_memory();
    check_virtual_memory();
    check_graphs();
    check_launches();
    check_skipped();
    check_failure();
    return failures != 0;
}
