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
#include "shm/waiting.h"

namespace ringcomm {

namespace {

// The fields of /proc/<pid>/stat, see proc(5).
constexpr int STATE = 3, START_DATA = 45, ENV_END = 51;
constexpr uint64_t IMAGE_PERIOD = 50'000'000;  // ns between two looks: one costs some microseconds

}  // namespace

Liveness::Liveness(int size, const int64_t* pids, const int* pidfds)
    : pids_(pids, pids + size), dead_(new std::atomic<bool>[size] {}), images_(new Image[size]) {
    for (int r = 0; r < size; ++r) {
        pidfds_.push_back(pidfds[r] < 0 ? -1 : fcntl(pidfds[r], F_DUPFD_CLOEXEC, 3));
        if (pids[r] != getpid()) images_[r].addresses = image_addresses(r);
    }
}

Liveness::~Liveness() {
    for (int pidfd : pidfds_) {
        if (pidfd >= 0) close(pidfd);
    }
}

bool Liveness::dead(int r) {
    if (dead_[r].load(std::memory_order_relaxed)) return true;
    if (!ended(r) && !replaced(r)) return false;
    dead_[r].store(true, std::memory_order_relaxed);
    return true;
}

bool Liveness::ended(int r) const {
    if (pidfds_[r] >= 0) {
        pollfd watched{pidfds_[r], POLLIN, 0};
        return poll(&watched, 1, 0) == 1;
    }
    // A thread of this process, or a kernel without pidfds.
    const char state = pids_[r] == getpid() ? 'R' : process_state(r);
    return state == 'Z' || state == 'X' || (state == 0 && kill(pids_[r], 0) != 0 && errno == ESRCH);
}

bool Liveness::replaced(int r) {
    Image& image = images_[r];
    const uint64_t now = tick_ns();
    if (image.addresses.empty() || now - image.checked.exchange(now) < IMAGE_PERIOD) return false;
    const std::string addresses = image_addresses(r);
    if (!addresses.empty() && addresses != image.addresses) image.replaced = true;
    return image.replaced;
}

// Returns "" where they are 0: this process may not read them, or the other one is exiting.
std::string Liveness::image_addresses(int r) const {
    const std::string addresses = stat_fields(r, START_DATA, ENV_END);
    return addresses.starts_with("0 ") ? "" : addresses;
}

char Liveness::process_state(int r) const {
    const std::string state = stat_fields(r, STATE, STATE);
    return state.empty() ? 0 : state[0];
}

// Returns "" where there is no such file.
std::string Liveness::stat_fields(int r, int first, int last) const {
    FILE* file = fopen(format("/proc/%" PRId64 "/stat", pids_[r]).c_str(), "re");
    if (!file) return "";
    char line[1024];
    line[fread(line, 1, sizeof line - 1, file)] = 0;
    fclose(file);
    const char* field = strrchr(line, ')');  // the name, field 2, may contain any character
    for (int number = 2; field && number < first; ++number) field = strchr(field + 1, ' ');
    if (!field) return "";
    const char* end = field;
    for (int number = first; end && number <= last; ++number) end = strchr(end + 1, ' ');
    return end ? std::string(field + 1, end) : std::string(field + 1);
}

}  // namespace ringcomm
