#include "world.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "errors.h"

namespace ringcomm {

World::World(int fd, int size, const int64_t* pids, const int* pidfds, const rc_tuning& tuning)
    : file(std::make_shared<File>(fd)),
      tuning(tuning),
      arena(std::make_shared<Arena>(file, 0, size, tuning.arena_bytes)),
      reach(arena, pids),
      pids_(pids, pids + size),
      dead_(new std::atomic<bool>[size] {}) {
    for (int r = 0; r < size; ++r) pidfds_.push_back(pidfds[r] < 0 ? -1 : fcntl(pidfds[r], F_DUPFD_CLOEXEC, 3));
}

World::~World() {
    for (int pidfd : pidfds_) {
        if (pidfd >= 0) close(pidfd);
    }
}

bool World::dead(int r) {
    if (dead_[r].load(std::memory_order_relaxed)) return true;
    bool ended;
    if (pidfds_[r] >= 0) {
        pollfd watched{pidfds_[r], POLLIN, 0};
        ended = poll(&watched, 1, 0) == 1;
    } else {
        // A thread of this process, or a kernel without pidfds.
        const char state = pids_[r] == getpid() ? 'R' : process_state(r);
        ended = state == 'Z' || state == 'X' || (state == 0 && kill(pids_[r], 0) != 0 && errno == ESRCH);
    }
    if (ended) dead_[r].store(true, std::memory_order_relaxed);
    return ended;
}

char World::process_state(int r) const {
    FILE* file = fopen(format("/proc/%" PRId64 "/stat", pids_[r]).c_str(), "re");
    if (!file) return 0;
    char line[512];
    const size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    const char* name_end = strrchr(line, ')');  // the name may hold anything, also spaces
    return name_end && name_end[1] ? name_end[2] : 0;
}

uint64_t World::reserve(uint64_t bytes) {
    const uint64_t rounded = round_up(bytes, PAGE);
    std::atomic<uint64_t>& file_end = arena->group().file_end;
    const uint64_t offset = file_end.fetch_add(rounded);
    try {
        file->extend_to(offset + rounded);
    } catch (const Failure& failure) {
        uint64_t end = offset + rounded;
        file_end.compare_exchange_strong(end, offset);  // the range is lost only if somebody has reserved behind it
        throw Failure(failure.error.code, format("extending the shared memory file by %zu bytes: ", size_t(rounded)) +
                                              failure.error.message);
    }
    return offset;
}

}  // namespace ringcomm
