// A look at a group from outside.
#include "shm/inspect.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "core/errors.h"
#include "shm/arena.h"

namespace ringcomm {

namespace {

class View {
public:
    View(int fd, uint64_t offset, size_t bytes) : bytes_(bytes) {
        struct stat status;
        if (fstat(fd, &status) != 0 || offset + bytes > uint64_t(status.st_size)) return;
        base_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, off_t(offset));
    }
    ~View() {
        if (base_ != MAP_FAILED) munmap(base_, bytes_);
    }
    View(const View&) = delete;
    const std::byte* base() const { return base_ == MAP_FAILED ? nullptr : static_cast<const std::byte*>(base_); }

private:
    void* base_ = MAP_FAILED;
    const size_t bytes_;
};

}  // namespace

std::vector<rc_rank_view> inspect(int fd, uint64_t offset, int most) {
    std::vector<rc_rank_view> ranks;
    const View first(fd, offset, sizeof(GroupHeader));
    if (!first.base()) return ranks;
    const auto& group = *reinterpret_cast<const GroupHeader*>(first.base());
    if (group.magic.load() != ARENA_MAGIC) return ranks;  // before the others, which are written before it
    const int size = group.size.load();
    const uint64_t part = group.part_bytes.load();
    if (size <= 0 || part < sizeof(RankHeader) || part > UINT32_MAX) return ranks;  // other memory that looks like one
    const View arena(fd, offset, sizeof(GroupHeader) + size * part);
    if (!arena.base()) return ranks;
    for (int r = 0; r < std::min(size, most); ++r) {
        const auto& header = *reinterpret_cast<const RankHeader*>(arena.base() + sizeof(GroupHeader) + r * part);
        rc_rank_view view{header.pid.load(),
                          header.member.load(),
                          header.state.load() == RANK_CLOSED,
                          header.flight.flights.load(),
                          header.flight.bytes.load(),
                          {}};
        copy_text(view.running, sizeof view.running, header.flight.describe(0));
        ranks.push_back(view);
    }
    return ranks;
}

}  // namespace ringcomm
