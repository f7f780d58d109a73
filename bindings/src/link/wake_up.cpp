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
    : Descriptor(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      prefix_("ringcomm/" + name + "/"),
      process_(process) {
    if (fd < 0) throw_errno("socket");
    const auto [address, bytes] = address_of(prefix_, process_);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes)) throw_errno("bind");
}

// One that has no room for more wakes up anyway.
void WakeUp::wake(int process) const {
    const auto [address, bytes] = address_of(prefix_, process);
    sendto(fd, nullptr, 0, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), bytes);
}

void WakeUp::clear() const {
    mmsghdr received[16]{};
    recvmmsg(fd, received, std::size(received), 0, nullptr);
}

}  // namespace ringcomm
