// The file of a trace.
#include "core/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

constexpr uint64_t HEADER = 4096;                           // bytes, written by Python but for the last 8
constexpr uint64_t PIECE = (1 << 20) / sizeof(TraceEntry);  // entries by which the file grows

// Powers of an odd number: 2^64 divided by the golden ratio.
constexpr std::array<uint64_t, 8> FACTORS = [] {
    std::array<uint64_t, 8> factors{};
    uint64_t power = 1;
    for (uint64_t& factor : factors) factor = power *= 0x9e3779b97f4a7c15;
    return factors;
}();

// Without its checksum.
std::array<uint64_t, 8> words_of(const TraceEntry& entry) {
    std::array<uint64_t, 8> words;
    memcpy(words.data(), &entry, sizeof entry);
    words[7] &= UINT32_MAX;
    return words;
}

// A multilinear hash: the upper half of the sum of the words, each times a factor of its own (Lemire and Kaser,
// "Strongly universal string hashing is fast", 2014). The products are independent, so that it takes few ns.
uint32_t checksum_of(const std::array<uint64_t, 8>& words) {
    uint64_t sum = 0;
    for (size_t i = 0; i < words.size(); ++i) sum += words[i] * FACTORS[i];
    return uint32_t(sum >> 32);
}

}  // namespace

Trace::Trace(int fd, Trace* outer) : outer(outer), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 3)) {
    if (fd_ < 0) throw_errno("opening its file");
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    base_ = static_cast<std::byte*>(base);
    if (const int error = base == MAP_FAILED ? errno : extend(1)) {
        if (base != MAP_FAILED) munmap(base, mapped_);
        close(fd_);
        errno = error;
        throw_errno(base == MAP_FAILED ? "mapping its file" : "extending its file");
    }
    dropped_ = reinterpret_cast<std::atomic<uint64_t>*>(base_ + HEADER) - 1;
    // Two looks at both clocks tell how many ticks a nanosecond has, should this rank be killed.
    const TraceEntry first = add_clock();
    began_ = first.start;
    began_ns_ = first.ns;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    add_clock();
}

Trace::~Trace() {
    end();
    munmap(base_, mapped_);
}

void Trace::add(const TraceEntry& entry, bool on_gpu) {
    if (over_.load(std::memory_order_relaxed) || entry.start < (on_gpu ? began_ns_ : began_)) {
        if (outer) outer->add(entry, on_gpu);
    } else if (!store(entry)) {
        dropped_->fetch_add(1, std::memory_order_relaxed);
    }
}

bool Trace::store(const TraceEntry& entry) {
    const uint64_t number = count_.fetch_add(1, std::memory_order_relaxed);
    if (number >= room_.load(std::memory_order_acquire) && extend(number + 1) != 0) return false;
    // In words: a load of what was just stored in narrower pieces waits for the store.
    std::array<uint64_t, 8> words = words_of(entry);
    words[7] |= uint64_t{checksum_of(words)} << 32;
    memcpy(base_ + HEADER + number * sizeof words, words.data(), sizeof words);
    return true;
}

void Trace::end() {
    if (fd_ < 0) return;
    over_.store(true);  // before the clock is read: calls that end later are not added
    add_clock();
    const std::lock_guard lock(extending_);
    ended_ = EBADF;
    close(std::exchange(fd_, -1));
    // The room does not grow any more, so no thread looks behind it.
    const size_t page = sysconf(_SC_PAGESIZE), used = HEADER + room_.load() * sizeof(TraceEntry);
    const size_t kept = (used + page - 1) / page * page;
    munmap(base_ + kept, mapped_ - kept);
    mapped_ = kept;
}

// Of several looks the quickest: others may have been interrupted.
TraceEntry Trace::add_clock() {
    TraceEntry best{};
    for (int i = 0; i < 8; ++i) {
        TraceEntry entry{TRACE_CLOCK, ticks(), 0, {}};
        entry.ns = now_ns();
        entry.end = ticks();
        if (i == 0 || entry.end - entry.start < best.end - best.start) best = entry;
    }
    store(best);
    return best;
}

// Beyond the end of a file, or where the disk is full, a store to the mapping would be a SIGBUS.
int Trace::extend(uint64_t entries) {
    const std::lock_guard lock(extending_);
    for (uint64_t room; (room = room_.load()) < entries && !ended_;) {
        const uint64_t begin = HEADER + room * sizeof(TraceEntry), bytes = PIECE * sizeof(TraceEntry);
        do {
            ended_ = begin + bytes > mapped_ ? EFBIG : posix_fallocate(fd_, off_t(begin), off_t(bytes));
        } while (ended_ == EINTR);
        if (ended_) {
            // A full disk may leave a part of the piece, which others could use, and which looks like a file cut short.
            [[maybe_unused]] const int unchanged = ftruncate(fd_, off_t(begin));
            break;
        }
        madvise(base_ + begin, bytes, MADV_POPULATE_WRITE);  // if the kernel can; else each page costs a fault
        room_.store(room + PIECE, std::memory_order_release);
    }
    return room_.load() >= entries ? 0 : ended_;
}

}  // namespace ringcomm
