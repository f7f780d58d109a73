// Cma: reads from the private memory of other processes.
#include "memory/cma.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

constexpr int NOT_TRIED = -1;

bool copy(int64_t pid, void* target, const void* address, size_t bytes) {
    auto to = static_cast<std::byte*>(target);
    auto from = static_cast<const std::byte*>(address);
    while (bytes) {
        const iovec here{to, bytes}, there{const_cast<std::byte*>(from), bytes};
        const ssize_t done = process_vm_readv(static_cast<pid_t>(pid), &here, 1, &there, 1, 0);
        if (done <= 0) {
            if (done == 0) errno = EFAULT;
            return false;
        }
        to += done;  // a partial read: the next attempt reports why
        from += done;
        bytes -= done;
    }
    return true;
}

// The operating system also copies by `rep movsb` (kernels/cpu/copy.h): 180 us in place of 38 for 512 KiB (Zen 4).
bool seems_to_overlap(const void* target, const void* source) {
    const size_t distance = (reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(source)) % PAGE;
    return distance && distance < 16;
}

bool copy_through_buffer(int64_t pid, std::byte* target, const std::byte* source, size_t bytes) {
    constexpr size_t PART = 128 << 10;
    // On the heap: every thread of the process would get a thread-local array, also one that never copies.
    thread_local std::unique_ptr<std::byte[]> buffer;
    if (!buffer) buffer.reset(new (std::nothrow) std::byte[PART + PAGE]);
    if (!buffer) return copy(pid, target, source, bytes);  // slower
    std::byte* const part =
        buffer.get() + (reinterpret_cast<uintptr_t>(source) - reinterpret_cast<uintptr_t>(buffer.get())) % PAGE;
    for (size_t done = 0; done < bytes; done += PART) {
        const size_t length = std::min(PART, bytes - done);
        if (!copy(pid, part, source + done, length)) return false;
        copy_block(target + done, part, length);
    }
    return true;
}

// PAGEMAP_SCAN of Linux 6.7; older system headers lack it.
struct PageRegion {
    uint64_t start, end, categories;
};
struct PageScan {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long SCAN_PAGES = _IOWR('f', 16, PageScan);
constexpr uint64_t PAGE_IS_HUGE = 1 << 6;

}  // namespace

Cma::Cma(std::shared_ptr<Arena> arena, const int64_t* pids)
    : arena_(std::move(arena)),
      pids_(pids, pids + arena_->size),
      own_pid_(getpid()),
      pagemap_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)),
      errors_(new std::atomic<int>[arena_->size]) {
    for (int r = 0; r < arena_->size; ++r) errors_[r].store(NOT_TRIED);
    if (getrandom(&secret_, sizeof secret_, 0) != sizeof secret_) throw_errno("getrandom");
}

Cma::~Cma() {
    if (pagemap_ >= 0) close(pagemap_);
}

void Cma::publish_secret(RankHeader& own) {
    own.secret.store(secret_);
    own.secret_address.store(reinterpret_cast<uintptr_t>(&secret_));
}

int Cma::error(int r) {
    int known = errors_[r].load(std::memory_order_relaxed);
    if (known == NOT_TRIED) errors_[r].store(known = probe(r), std::memory_order_relaxed);
    return known;
}

int Cma::probe(int r) const {
    const RankHeader& theirs = arena_->rank(r);
    uint64_t found;
    if (!read(r, &found, reinterpret_cast<const void*>(theirs.secret_address.load()), sizeof found)) return errno;
    return found == theirs.secret.load() ? 0 : ESRCH;  // the pid names another process here
}

bool Cma::read(int r, void* target, const void* address, size_t bytes) const {
    if (bytes >= PAGE && seems_to_overlap(target, address))
        return copy_through_buffer(pids_[r], static_cast<std::byte*>(target), static_cast<const std::byte*>(address),
                                   bytes);
    return copy(pids_[r], target, address, bytes);
}

bool Cma::readable(const void* address) const {
    std::byte found;
    return copy(own_pid_, &found, address, sizeof found);
}

bool Cma::in_huge_page(const void* address) const {
    const uint64_t page = reinterpret_cast<uintptr_t>(address) / PAGE * PAGE;
    PageRegion found;
    PageScan scan{};
    scan.size = sizeof scan;
    scan.start = page;
    scan.end = page + PAGE;
    scan.vec = reinterpret_cast<uintptr_t>(&found);
    scan.vec_len = 1;
    scan.category_mask = scan.return_mask = PAGE_IS_HUGE;
    return ioctl(pagemap_, SCAN_PAGES, &scan) == 1;
}

}  // namespace ringcomm
