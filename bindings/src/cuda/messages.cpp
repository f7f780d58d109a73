#include "cuda/messages.h"

#include <algorithm>
#include <bit>

#include "cuda/liveness.h"

namespace ringcomm {

namespace {

constexpr size_t SMALLEST = 64 << 10;  // of a buffer on the device

// Chunks of pinned memory, by way. To the host, one is copied while the one before is sent: a copy of 1 MiB takes some
// 20 us over PCIe 5.0, several times what it takes to queue it. To the GPU, each packet that arrives has its own.
struct Chunks {
    size_t bytes;
    int most;
};
constexpr Chunks CHUNKS[] = {{1 << 20, 6}, {128 << 10, 32}};

}  // namespace

// Events and buffers that are used again. It lives as long as any of them.
struct GpuMessages::Pool {
    const Driver& driver;
    const CUcontext context;
    std::mutex mutex;
    std::vector<CUevent> events;
    std::multimap<size_t, std::byte*> memory;  // of the device, by size
    std::vector<std::byte*> chunks[2];         // by way
    int made[2] = {};                          // of them, in all

    ~Pool() {
        CUcontext ours;
        if (driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
        {
            const OutsideCaptures mode(driver);
            for (CUevent event : events) driver.cuEventDestroy_v2(event);
            for (const auto& [bytes, buffer] : memory) driver.cuMemFree_v2(reinterpret_cast<CUdeviceptr>(buffer));
            for (const auto& pinned : chunks)
                for (std::byte* chunk : pinned) driver.cuMemFreeHost(chunk);
        }
        driver.cuCtxPopCurrent_v2(&ours);
    }
};

GpuMessages::GpuMessages(const Driver& driver, const rc_gpu_messages_setup& setup, int rank)
    : device(setup.device),
      driver_(driver),
      context_(static_cast<CUcontext>(setup.context)),
      function_(static_cast<CUfunction>(setup.function)),
      threads_(setup.threads),
      control_(static_cast<cuda::Control*>(setup.control)),
      completed_(setup.completed),
      pool_(new Pool{driver, context_, {}, {}, {}, {}, {}}) {
    args_.arena = {static_cast<cuda::byte*>(setup.arena),
                   cuda::layout_of(cuda::bits_as<cuda::MessageShape>(setup.shape))};
    args_.control = control_;
    args_.rank = rank;
    const auto context = current();
    handle_.process = setup.process;
    handle_.address = reinterpret_cast<uint64_t>(setup.arena);
    handle_.ordinal = setup.ordinal;
    driver.check(driver.cuIpcGetMemHandle(&handle_.memory, handle_.address), "cuIpcGetMemHandle");
    for (uint32_t slot = 0; slot < setup.shape.slots; ++slot) free_.push_back({int(slot), 0, 0});
    opened_[rank] = reinterpret_cast<std::byte*>(args_.arena.base);
    for (CUstream& stream : copies_) made(stream);
    const OutsideCaptures mode(driver);
    driver.check(driver.cuMemHostAlloc(&released_, setup.shape.slots * cuda::FLAG, HOST_ALLOC_PORTABLE),
                 "cuMemHostAlloc");
}

// The launches are over. What fails here fails because the GPU has.
GpuMessages::~GpuMessages() {
    try {
        const auto context = current();
        const OutsideCaptures mode(driver_);
        for (const auto& streams : {send_, receive_})
            for (const auto& [peer, stream] : streams) driver_.cuStreamDestroy_v2(stream);
        for (CUstream stream : copies_) driver_.cuStreamDestroy_v2(stream);
        driver_.cuMemFreeHost(released_);
        for (const CUdeviceptr arena : mapped_) driver_.cuIpcCloseMemHandle(arena);
    } catch (const Failure&) {
    }
}

bool GpuMessages::capturing(CUstream stream) const {
    CUstreamCaptureStatus status;
    const CUresult result = driver_.cuStreamIsCapturing(stream, &status);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
    driver_.check(result, "cuStreamIsCapturing");
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// ---- Blocks.

bool GpuMessages::may_stage_at_once() {
    const auto read = [this] {
        return size_t(std::count_if(free_.begin(), free_.end(), [](const Slot& each) { return !each.last; }));
    };
    if (read() > for_chunks()) return true;
    if (!may_stage_early()) return false;
    note_read();
    return read() > for_chunks();
}

// Asks the GPU from which of the free slots the last message has been read.
void GpuMessages::note_read() {
    const auto context = current();
    const OutsideCaptures mode(driver_);
    const cuda::MessageArena& arena = args_.arena;
    copy(released_, arena.released(arena.base, 0), arena.layout.shape.slots * cuda::FLAG, copies(TO_HOST));
    driver_.check(driver_.cuStreamSynchronize(copies(TO_HOST)), "cuStreamSynchronize");
    for (Slot& slot : free_) {
        const auto* const flag = static_cast<const std::byte*>(released_) + slot.index * cuda::FLAG;
        if (*reinterpret_cast<const uint64_t*>(flag) >= slot.last) slot.last = 0;
    }
}

cuda::MessageTransfer GpuMessages::stage(const std::byte* data, uint64_t bytes, int peer, bool at_once) {
    // Else best one whose last message no other peer has to read first: that may take as long as the peer's stream.
    const auto rank = [&](const Slot& each) { return !each.last ? (at_once ? 0 : 3) : each.reader == peer ? 1 : 2; };
    const auto chosen =
        std::min_element(free_.begin(), free_.end(), [&](const Slot& a, const Slot& b) { return rank(a) < rank(b); });
    const Slot slot = *chosen;
    free_.erase(chosen);
    auto* const source = reinterpret_cast<cuda::byte*>(const_cast<std::byte*>(data));  // only read
    return {source, args_.arena.base, bytes, ++numbers_, slot.last, cuda::STAGE, peer, slot.index, slot.reader};
}

cuda::MessageTransfer GpuMessages::fetch(std::byte* data, uint64_t bytes, int peer, GpuLocation at) const {
    auto* const arena = reinterpret_cast<cuda::byte*>(opened_.at(peer));
    return {reinterpret_cast<cuda::byte*>(data), arena, bytes, at.number, 0, cuda::FETCH, peer, at.slot, 0};
}

void GpuMessages::free_dropped() {
    std::erase_if(dropped_, [&](const Dropped& each) {
        if (!ended(each.launch)) return false;
        free_.push_back({each.slot, 0, 0});
        return true;
    });
}

bool GpuMessages::all_read() {
    free_dropped();
    if (free_.size() < args_.arena.layout.shape.slots) return false;
    note_read();
    return std::all_of(free_.begin(), free_.end(), [](const Slot& slot) { return !slot.last; });
}

// ---- Arenas of peers.

bool GpuMessages::open(int peer, const ArenaHandle& from) {
    const auto known = opened_.find(peer);
    if (known != opened_.end()) return known->second;
    const auto context = current();
    const OutsideCaptures mode(driver_);
    CUdeviceptr arena = from.address;
    CUresult result = CUDA_SUCCESS;
    if (from.process != handle_.process) {
        result = driver_.cuIpcOpenMemHandle_v2(&arena, from.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (result == CUDA_SUCCESS) mapped_.push_back(arena);
    } else if (from.ordinal != handle_.ordinal) {  // a thread of this process
        CUdevice device;
        CUcontext other = nullptr;
        result = driver_.cuDeviceGet(&device, from.ordinal);
        if (result == CUDA_SUCCESS) result = driver_.cuDevicePrimaryCtxRetain(&other, device);
        if (result == CUDA_SUCCESS) result = driver_.cuCtxEnablePeerAccess(other, 0);
        if (result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) result = CUDA_SUCCESS;
    }
    if (result != CUDA_SUCCESS) arena = 0;
    opened_[peer] = reinterpret_cast<std::byte*>(arena);
    return arena;
}

// ---- Launches.

bool GpuMessages::has_room() {
    const uint64_t next = launches_ + 1;
    return next <= cuda::MAX_LAUNCHES || ended(next - cuda::MAX_LAUNCHES);
}

uint64_t GpuMessages::launch(std::span<const cuda::MessageTransfer> transfers, CUstream stream, double timeout) {
    const uint64_t number = ++launches_;
    args_.call = number;
    args_.launch = int(number % cuda::MAX_LAUNCHES);
    args_.completed = completed_ + args_.launch;
    args_.timeout_ns = uint64_t(std::clamp(timeout, 0.0, 1e9) * 1e9);
    args_.count = int(transfers.size());
    std::copy(transfers.begin(), transfers.end(), args_.transfers);
    const int blocks = cuda::plan_messages(args_);
    void* arguments[] = {&args_};
    driver_.check(driver_.cuLaunchKernel(function_, blocks, 1, 1, threads_, 1, 1, 0, stream, arguments, nullptr),
                  "cuLaunchKernel");
    return number;
}

std::string GpuMessages::broken_context() const {
    const auto context = current();
    return ringcomm::broken_context(driver_, copies(TO_HOST));
}

// ---- Streams, events and copies.

CUstream GpuMessages::made(CUstream& stream) const {
    if (stream) return stream;
    int least, most;
    driver_.check(driver_.cuCtxGetStreamPriorityRange(&least, &most), "cuCtxGetStreamPriorityRange");
    driver_.check(driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, most),
                  "cuStreamCreateWithPriority");
    return stream;
}

GpuEvent GpuMessages::record(CUstream stream) {
    CUevent event = nullptr;
    {
        const std::lock_guard lock(pool_->mutex);
        if (!pool_->events.empty()) {
            event = pool_->events.back();
            pool_->events.pop_back();
        }
    }
    if (!event) driver_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    GpuEvent shared(event, [pool = pool_](CUevent used) {
        const std::lock_guard lock(pool->mutex);
        pool->events.push_back(used);
    });
    driver_.check(driver_.cuEventRecord(event, stream), "cuEventRecord");
    return shared;
}

void GpuMessages::wait(CUstream stream, const GpuEvent& event) const {
    if (event) driver_.check(driver_.cuStreamWaitEvent(stream, event.get(), 0), "cuStreamWaitEvent");
}

bool GpuMessages::reached(const GpuEvent& event) const {
    const OutsideCaptures mode(driver_);
    const CUresult result = driver_.cuEventQuery(event.get());
    if (result != CUDA_ERROR_NOT_READY) driver_.check(result, "cuEventQuery");
    return result == CUDA_SUCCESS;
}

void GpuMessages::copy(void* target, const void* source, size_t bytes, CUstream stream) const {
    const auto address = [](const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); };
    if (bytes) driver_.check(driver_.cuMemcpyAsync(address(target), address(source), bytes, stream), "cuMemcpyAsync");
}

GpuBuffer GpuMessages::memory(size_t bytes) {
    const size_t size = std::bit_ceil(std::max(bytes, SMALLEST));
    const std::lock_guard lock(pool_->mutex);
    std::byte* memory = nullptr;
    if (const auto found = pool_->memory.find(size); found != pool_->memory.end()) {
        memory = found->second;
        pool_->memory.erase(found);
    } else {
        const OutsideCaptures mode(driver_);
        CUdeviceptr made = 0;
        driver_.check(driver_.cuMemAlloc_v2(&made, size), "cuMemAlloc");
        memory = reinterpret_cast<std::byte*>(made);
    }
    return {memory, [pool = pool_, size](std::byte* used) {
                const std::lock_guard lock(pool->mutex);
                pool->memory.emplace(size, used);
            }};
}

// ---- Between the GPU and the host.

size_t GpuMessages::chunk_bytes(Way way) { return CHUNKS[way].bytes; }

GpuBuffer GpuMessages::chunk(Way way) {
    const std::lock_guard lock(pool_->mutex);
    auto& free = pool_->chunks[way];
    if (free.empty()) {
        if (pool_->made[way] == CHUNKS[way].most) return nullptr;
        const OutsideCaptures mode(driver_);
        void* made = nullptr;
        driver_.check(driver_.cuMemHostAlloc(&made, CHUNKS[way].bytes, HOST_ALLOC_PORTABLE), "cuMemHostAlloc");
        ++pool_->made[way];
        free.push_back(static_cast<std::byte*>(made));
    }
    std::byte* const memory = free.back();
    free.pop_back();
    return {memory, [pool = pool_, way](std::byte* used) {
                const std::lock_guard lock(pool->mutex);
                pool->chunks[way].push_back(used);
            }};
}

void GpuMessages::finish_copies() {
    const auto context = current();
    const OutsideCaptures mode(driver_);
    for (CUstream stream : copies_) driver_.cuStreamSynchronize(stream);
}

}  // namespace ringcomm
