// A look at a group from outside.
#include "shm/inspect.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "core/errors.h"
#include "core/waiting.h"
#include "memory/arena.h"

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

rc_rank_view view_of(const RankHeader& header, int size, uint64_t part) {
    rc_rank_view view{};
    view.pid = header.pid.load();
    view.member = header.member.load();
    view.closed = header.state.load() == RANK_CLOSED;
    view.of_ranks = size;
    view.waits_for = header.flight.waits_for_member.load() - 1;
    view.waits_for_process = -1;
    const FlightRecord* record = &header.flight;
    if (header.is_between_hosts.load() && part > BETWEEN_HOSTS_BYTES) {
        const auto* const end = reinterpret_cast<const std::byte*>(&header) + part;
        const auto& between = *reinterpret_cast<const FlightBetweenHosts*>(end - BETWEEN_HOSTS_BYTES);
        record = &between.record;
        view.of_ranks = between.group_size;
        view.process = between.process;
        view.processes = between.processes;
        view.waits_for_process = record->waits_for_member.load() - 1;
    }
    view.calls = record->flights.load();
    view.bytes = record->bytes.load();
    auto call = record->running();
    if (!call) call = header.flight.running();  // its ranks on this host split, or allocate
    if (view.closed || !call) return view;
    copy_text(view.call, sizeof view.call, call->describe());
    const uint64_t now = now_ns();
    view.seconds = now > call->start ? double(now - call->start) * 1e-9 : 0.0;
    return view;
}

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
        ranks.push_back(view_of(header, size, part));
    }
    return ranks;
}

}  // namespace ringcomm
