// WakeUp: empty datagrams.
#include "link/wake_up.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

namespace {

std::pair<sockaddr_un, socklen_t> address_of(const std::string& prefix, int process) {
    const std::string name = prefix + std::to_string(process);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (name.size() >= sizeof address.sun_path) throw Failure(RC_ARGUMENT, "the name of the network is too long", -1);
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    return {address, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

}  // namespace

WakeUp::WakeUp(const std::string& name, int process)
    : Descriptor(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), prefix_("ringcomm/" + name + "/") {
    if (fd < 0) throw_errno("socket");
    const auto [address, bytes] = address_of(prefix_, process);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes)) throw_errno("bind");
}

// A process that has no room for more wakes up anyway. What nobody has read yet counts against this process, too: so
// all read at least now and then.
void WakeUp::wake(int process) const {
    const auto [address, bytes] = address_of(prefix_, process);
    sendto(fd, nullptr, 0, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), bytes);
}

bool WakeUp::clear() const {
    constexpr int MOST = 16;  // in one call
    mmsghdr received[MOST]{};
    const int first = recvmmsg(fd, received, MOST, 0, nullptr);
    for (int last = first; last == MOST;) last = recvmmsg(fd, received, MOST, 0, nullptr);
    return first > 0;
}

}  // namespace ringcomm
