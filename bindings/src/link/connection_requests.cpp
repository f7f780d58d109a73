// ConnectionRequests: two lists, and an eventfd.
#include "link/connection_requests.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

ConnectionRequests::ConnectionRequests() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.fd < 0) throw_errno("eventfd");
}

void ConnectionRequests::want(Wanted connection) {
    wanted_.push_back(connection);
    eventfd_write(event_.fd, 1);
}

void ConnectionRequests::flow_ended(EndedFlow flow) {
    ended_flows_.push_back(std::move(flow));
    eventfd_write(event_.fd, 1);
}

std::vector<ConnectionRequests::Wanted> ConnectionRequests::take_wanted(size_t most) {
    eventfd_t events;
    eventfd_read(event_.fd, &events);
    const auto end = wanted_.begin() + std::min(wanted_.size(), most);
    std::vector<Wanted> taken(wanted_.begin(), end);
    wanted_.erase(wanted_.begin(), end);
    if (!wanted_.empty()) eventfd_write(event_.fd, 1);
    return taken;
}

std::optional<ConnectionRequests::EndedFlow> ConnectionRequests::take_ended_flow() {
    if (ended_flows_.empty()) return {};
    EndedFlow ended = std::move(ended_flows_.front());
    ended_flows_.pop_front();
    return ended;
}

}  // namespace ringcomm
