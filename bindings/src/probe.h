// Measures once, at the start, how a block of memory goes over best from one core to another on this machine.
#pragma once

#include <cstddef>

namespace ringcomm {

// Bytes per second at which one thread writes a block that another then reads; `streamed`: non-temporal stores.
double probe_handover(size_t bytes, bool streamed);

}  // namespace ringcomm
