// Liveness: notices the death of a rank's process.
#include "shm/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "core/errors.h"

namespace ringcomm {

Liveness::Liveness(int size, const int64_t* pids, const int* pidfds)
    : pids_(pids, pids + size), dead_(new std::atomic<bool>[size] {}) {
    for (int r = 0; r < size; ++r) pidfds_.push_back(pidfds[r] < 0 ? -1 : fcntl(pidfds[r], F_DUPFD_CLOEXEC, 3));
}

Liveness::~Liveness() {
    for (int pidfd : pidfds_) {
        if (pidfd >= 0) close(pidfd);
    }
}

bool Liveness::dead(int r) {
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

char Liveness::process_state(int r) const {
    FILE* file = fopen(format("/proc/%" PRId64 "/stat", pids_[r]).c_str(), "re");
    if (!file) return 0;
    char line[512];
    const size_t length = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[length] = 0;
    const char* name_end = strrchr(line, ')');  // the name may contain any character
    return name_end && name_end[1] ? name_end[2] : 0;
}

}  // namespace ringcomm
