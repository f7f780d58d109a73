// A look at a group from outside.
#include "shm/inspect.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>

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

std::vector<rc_rank_view> inspect(int fd, uint64_t offset, int most, uint64_t& id) {
    std::vector<rc_rank_view> ranks;
    const View first(fd, offset, sizeof(GroupHeader)), world(fd, 0, sizeof(GroupHeader));
    if (!first.base() || !world.base()) return ranks;
    const auto& group = *reinterpret_cast<const GroupHeader*>(first.base());
    const int size = group.size.load();
    const uint64_t part = group.part_bytes.load();
    if (group.magic.load() != ARENA_MAGIC || size <= 0 || part < sizeof(RankHeader)) return ranks;
    const View arena(fd, offset, sizeof(GroupHeader) + size * part);
    if (!arena.base()) return ranks;
    id = group_id(*reinterpret_cast<const GroupHeader*>(world.base()), offset);
    for (int r = 0; r < std::min(size, most); ++r) {
        const auto& header = *reinterpret_cast<const RankHeader*>(arena.base() + sizeof(GroupHeader) + r * part);
        rc_rank_view view{header.pid.load(),
                          header.member.load(),
                          header.state.load() == RANK_CLOSED,
                          header.flight.waits_for.load() - 1,
                          header.flight.flights.load(),
                          header.flight.bytes.load(),
                          {}};
        copy_text(view.running, sizeof view.running, header.flight.describe(0));
        ranks.push_back(view);
    }
    return ranks;
}

}  // namespace ringcomm
