// The file of a trace.
#include "core/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "core/errors.h"

namespace ringcomm {

namespace {

constexpr uint64_t HEADER = 4096;                           // bytes, written by Python
constexpr uint64_t MOST = uint64_t{1} << 32;                // bytes: 67 million calls
constexpr uint64_t PIECE = (1 << 20) / sizeof(TraceEntry);  // entries by which the file grows

}  // namespace

Trace::Trace(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 3)) {
    if (fd_ < 0) throw_errno("opening the file of a trace");
    void* base = mmap(nullptr, MOST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (base == MAP_FAILED) {
        close(fd_);
        throw_errno("mapping the file of a trace");
    }
    base_ = static_cast<std::byte*>(base);
    // Two looks at both clocks tell how many ticks a nanosecond has, to a few millionths.
    add_clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    add_clock();
}

Trace::~Trace() {
    munmap(base_, MOST);
    close(fd_);
}

void Trace::add(const TraceEntry& entry) {
    const uint64_t number = count_.fetch_add(1, std::memory_order_relaxed);
    if (number >= room_.load(std::memory_order_acquire) && !extend(number + 1)) return;
    memcpy(base_ + HEADER + number * sizeof entry, &entry, sizeof entry);
}

void Trace::add_clock() {
    TraceEntry entry{TRACE_CLOCK, ticks(), 0, {}};
    entry.ns = now_ns();
    entry.end = ticks();
    add(entry);
}

// Beyond the end of a file, or where the disk is full, a store to the mapping would be a SIGBUS.
bool Trace::extend(uint64_t entries) {
    const std::lock_guard lock(extending_);
    while (!full_ && room_.load() < entries) {
        const uint64_t room = room_.load();
        const uint64_t begin = HEADER + room * sizeof(TraceEntry), bytes = PIECE * sizeof(TraceEntry);
        full_ = begin + bytes > MOST || posix_fallocate(fd_, off_t(begin), off_t(bytes)) != 0;
        if (full_) break;
        madvise(base_ + begin, bytes, MADV_POPULATE_WRITE);  // if the kernel can; else each page costs a fault
        room_.store(room + PIECE, std::memory_order_release);
    }
    return room_.load() >= entries;
}

}  // namespace ringcomm
