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
#include "core/waiting.h"

namespace ringcomm {

namespace {

// The fields of /proc/<pid>/stat, see proc(5).
constexpr int STATE = 3, START_DATA = 45, ENV_END = 51;
constexpr uint64_t IMAGE_PERIOD = 50'000'000;  // ns between two looks: one costs some microseconds

// Returns "" where there is no such file.
std::string stat_fields(int64_t pid, int first, int last) {
    FILE* file = fopen(format("/proc/%" PRId64 "/stat", pid).c_str(), "re");
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

// The process behind a pidfd as this process numbers it: in another pid namespace its own number is another process.
// 0 if unknown.
int64_t pid_of(int pidfd) {
    FILE* file = fopen(format("/proc/self/fdinfo/%d", pidfd).c_str(), "re");
    if (!file) return 0;
    char line[256];
    int64_t pid = 0;
    while (fgets(line, sizeof line, file)) sscanf(line, "Pid: %" SCNd64, &pid);
    fclose(file);
    return pid;
}

}  // namespace

Liveness::Liveness(int size, const int64_t* pids, const int* pidfds)
    : pids_(pids, pids + size), dead_(new std::atomic<bool>[size] {}), images_(new Image[size]) {
    for (int r = 0; r < size; ++r) {
        pidfds_.push_back(pidfds[r] < 0 ? -1 : fcntl(pidfds[r], F_DUPFD_CLOEXEC, 3));
        if (pidfds_[r] < 0 || pids[r] == getpid()) continue;
        images_[r].pid = pid_of(pidfds_[r]);
        if (images_[r].pid > 0) images_[r].addresses = image_addresses(r);
    }
}

Liveness::~Liveness() {
    for (int pidfd : pidfds_) {
        if (pidfd >= 0) close(pidfd);
    }
}

bool Liveness::dead(int r) {
    if (dead_[r].load(std::memory_order_acquire)) return true;
    if (!ended(r) && !replaced(r)) return false;
    dead_[r].store(true, std::memory_order_release);  // who sees it sees all that the rank has written
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
    uint64_t last = image.checked.load();
    if (image.addresses.empty() || now - last < IMAGE_PERIOD) return false;
    if (!image.checked.compare_exchange_strong(last, now)) return false;  // another thread looks
    const std::string addresses = image_addresses(r);
    if (!addresses.empty() && addresses != image.addresses) image.replaced = true;
    return image.replaced;
}

// Returns "" where they are 0: this process may not read them, or the other one is exiting.
std::string Liveness::image_addresses(int r) const {
    const std::string addresses = stat_fields(images_[r].pid, START_DATA, ENV_END);
    return addresses.starts_with("0 ") ? "" : addresses;
}

bool Liveness::stopped(int r) const {
    const char state = pids_[r] == getpid() ? 'R' : process_state(r);
    return state == 'T' || state == 't';
}

char Liveness::process_state(int r) const {
    const std::string state = stat_fields(pids_[r], STATE, STATE);
    return state.empty() ? 0 : state[0];
}

}  // namespace ringcomm
