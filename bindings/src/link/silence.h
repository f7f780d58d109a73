#pragma once

namespace ringcomm {

// Whether the other host of a TCP connection has not answered for so many seconds: to a probe, or to data.
bool silent(int socket, double idle_timeout, double resend_timeout);

}  // namespace ringcomm
