// Measures once, at the start, how a block of memory goes over best from one core to another on this machine.
#pragma once

#include <cstddef>

namespace ringcomm {

// Bytes per second at which a thread on the core `writer` writes a block that one on the core `reader` then reads;
// `streamed`: by non-temporal stores.
double probe_handover(size_t bytes, bool streamed, int writer, int reader);

}  // namespace ringcomm
