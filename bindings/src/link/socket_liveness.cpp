// How a SocketLink notices that a peer is lost: its process has ended, which closes the connection, or its host does
// not answer.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "link/connection.h"
#include "link/silence.h"

namespace ringcomm {

// What the peer has sent before is still read: read() then finds the end.
void Connection::write_failed(int code) {
    failure_ = strerror(code);
    fail_sends();
}

void Connection::read_ended(int code) {
    if (code && code != EAGAIN && failure_.empty()) failure_ = strerror(code);
    lose(failure_.empty() ? "closed the connection" : failure_);
}

// TCP itself gives up after a quarter of an hour. TCP_USER_TIMEOUT would also end the connection to a process that does
// not read because it computes, whose host still acknowledges every probe.
bool silent(int socket, double idle_timeout, double resend_timeout) {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes)) return false;
    const bool unanswered = std::max(info.tcpi_retransmits, info.tcpi_probes) > 1;
    const double timeout = info.tcpi_retransmits ? resend_timeout : idle_timeout;
    return unanswered && info.tcpi_last_ack_recv >= 1000 * timeout;
}

void Connection::lose_if_silent(double idle_timeout, double resend_timeout) {
    if (!open()) return;
    if (silent(stream_->fd, idle_timeout, resend_timeout)) return lose(strerror(ETIMEDOUT));
    flows_.end_if_silent(idle_timeout, resend_timeout);
    carry_orphans();
}

}  // namespace ringcomm
