// The file of a trace.
#include "core/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

constexpr uint64_t HEADER = 4096;                           // bytes, written by Python
constexpr uint64_t MOST = uint64_t{1} << 32;                // bytes: 67 million calls
constexpr uint64_t PIECE = (1 << 20) / sizeof(TraceEntry);  // entries by which the file grows

}  // namespace

Trace::Trace(int fd, Trace* outer) : outer(outer), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 3)) {
    if (fd_ < 0) throw_errno("opening the file of a trace");
    void* base = mmap(nullptr, MOST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    base_ = static_cast<std::byte*>(base);
    if (const int error = base == MAP_FAILED ? errno : extend(1)) {
        if (base != MAP_FAILED) munmap(base, MOST);
        close(fd_);
        errno = error;
        throw_errno("writing a trace");
    }
    // Two looks at both clocks tell how many ticks a nanosecond has, should this rank be killed.
    add_clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    add_clock();
}

Trace::~Trace() {
    end();
    munmap(base_, MOST);
}

void Trace::add(const TraceEntry& entry) {
    const uint64_t number = count_.fetch_add(1, std::memory_order_relaxed);
    if (number >= room_.load(std::memory_order_acquire) && extend(number + 1) != 0) return;
    memcpy(base_ + HEADER + number * sizeof entry, &entry, sizeof entry);
}

void Trace::end() {
    if (fd_ < 0) return;
    add_clock();
    const std::lock_guard lock(extending_);
    ended_ = EBADF;
    close(std::exchange(fd_, -1));
}

// Of several looks the quickest: others may have been interrupted.
void Trace::add_clock() {
    TraceEntry best{};
    for (int i = 0; i < 8; ++i) {
        TraceEntry entry{TRACE_CLOCK, ticks(), 0, {}};
        entry.ns = now_ns();
        entry.end = ticks();
        if (i == 0 || entry.end - entry.start < best.end - best.start) best = entry;
    }
    add(best);
}

// Beyond the end of a file, or where the disk is full, a store to the mapping would be a SIGBUS.
int Trace::extend(uint64_t entries) {
    const std::lock_guard lock(extending_);
    for (uint64_t room; (room = room_.load()) < entries && !ended_;) {
        const uint64_t begin = HEADER + room * sizeof(TraceEntry), bytes = PIECE * sizeof(TraceEntry);
        do {
            ended_ = begin + bytes > MOST ? EFBIG : posix_fallocate(fd_, off_t(begin), off_t(bytes));
        } while (ended_ == EINTR);
        if (ended_) break;
        madvise(base_ + begin, bytes, MADV_POPULATE_WRITE);  // if the kernel can; else each page costs a fault
        room_.store(room + PIECE, std::memory_order_release);
    }
    return room_.load() >= entries ? 0 : ended_;
}

}  // namespace ringcomm
