// Mapping, File and Arena: shared memory.
#include "memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <tuple>

#include "core/errors.h"

namespace ringcomm {

namespace {

void fallocate_range(int fd, int mode, uint64_t offset, size_t bytes) {
    while (fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
        if (errno != EINTR) throw_errno(format("reserving %zu bytes of shared memory", bytes).c_str());
    }
}

}  // namespace

int create_file() {
    const int fd = memfd_create("ringcomm", MFD_CLOEXEC);
    if (fd < 0) throw_errno("creating a file of shared memory (memfd_create)");
    return fd;
}

Mapping::Mapping(int fd, uint64_t offset, size_t bytes) : bytes_(bytes) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
    if (base == MAP_FAILED) throw_errno(format("mapping %zu bytes of shared memory", bytes).c_str());
    base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() { munmap(base_, bytes_); }

File::File(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 3)) {
    struct stat status;
    if (fd_ < 0 || fstat(fd_, &status) != 0) throw_errno("opening the shared memory file");
    device_ = status.st_dev;
    inode_ = status.st_ino;
}

File::~File() { close(fd_); }

std::shared_ptr<Mapping> File::map(uint64_t offset, size_t bytes) {
    static std::mutex mutex;
    static std::map<std::tuple<uint64_t, uint64_t, uint64_t, size_t>, std::weak_ptr<Mapping>> mappings;
    const std::lock_guard lock(mutex);
    std::erase_if(mappings, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<Mapping>& known = mappings[{device_, inode_, offset, bytes}];
    auto mapping = known.lock();
    if (!mapping) known = mapping = std::make_shared<Mapping>(fd_, offset, bytes);
    return mapping;
}

// In pieces: the kernel undoes what a signal interrupts, and a timer could do so for ever.
void File::allocate(uint64_t offset, size_t bytes) {
    constexpr size_t PIECE = 1 << 20;
    for (size_t at = 0; at < bytes; at += PIECE) fallocate_range(fd_, 0, offset + at, std::min(PIECE, bytes - at));
}

// Two ranks may extend concurrently: fallocate only grows a file, ftruncate could shrink it.
void File::extend_to(uint64_t end) { fallocate_range(fd_, 0, end - PAGE, PAGE); }

uint64_t File::bytes() const {
    struct stat status;
    if (fstat(fd_, &status) != 0) throw_errno("asking for the size of the shared memory file");
    return status.st_size;
}

void File::discard(uint64_t offset, size_t bytes) {
    if (bytes == 0) return;
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

PartLayout::PartLayout(int size, size_t budget) {
    const size_t n = size;
    counts = round_up(sizeof(RankHeader), LINE);
    packet_rings = round_up(counts + 2 * 2 * n * sizeof(uint64_t), LINE);
    const size_t peers = n - 1;
    byte_rings = round_up(packet_rings + peers * sizeof(PacketRing), PAGE);
    const size_t rest = peers && budget > byte_rings ? budget - byte_rings : 0;
    // A quarter of the budget for point-to-point. A writer finds a larger ring in its cache less often: the copies into
    // one of 1 MiB take two thirds of the time (Zen 5), and ranks that share a core switch a quarter as often.
    constexpr size_t LEAST_RING = 1 << 10, MOST_RING = 1 << 20;
    const size_t share = rest / 4 / std::max(peers, size_t{1});
    ring_bytes = std::clamp(share - share % LEAST_RING, LEAST_RING, MOST_RING);
    staging = round_up(byte_rings + peers * ring_bytes, PAGE);
    // Four buffers: two for this call, and two that peers may still read for the previous call.
    const size_t left = peers && budget > staging ? (budget - staging) / 4 : 0;
    staging_bytes = round_up(std::clamp(left - left % PAGE, n * 64, size_t{1} << 20), PAGE);
    between_hosts = round_up(staging + 4 * staging_bytes, PAGE);
    part_bytes = between_hosts + BETWEEN_HOSTS_BYTES;
}

Arena::Arena(std::shared_ptr<File> file, uint64_t offset, int size, size_t budget)
    : size(size),
      offset(offset),
      layout(size, budget),
      file_(std::move(file)),
      mapping_(file_->map(offset, layout.arena_bytes(size))) {}

void Arena::allocate(int r) {
    const uint64_t begin = r == 0 ? 0 : sizeof(GroupHeader) + r * layout.part_bytes;
    file_->allocate(offset + begin, sizeof(GroupHeader) + r * layout.part_bytes + layout.between_hosts - begin);
}

void Arena::allocate_between_hosts(int r) {
    const uint64_t begin = sizeof(GroupHeader) + r * layout.part_bytes + layout.between_hosts;
    file_->allocate(offset + begin, sizeof(FlightBetweenHosts));
}

void Arena::discard() {
    // Groups split from this one still read its failure, and ranks that were left out, who continues.
    const size_t kept = group().failure.state.load() || group().successor.load() ? sizeof(GroupHeader) : 0;
    file_->discard(offset + kept, layout.arena_bytes(size) - kept);
}

}  // namespace ringcomm
