// Measures, once at the start, which stores hand a block of memory over faster between cores of this machine.
#pragma once

#include <cstddef>

namespace ringcomm {

// Bytes per second at which a thread on the core `writer` writes a block that one on the core `reader` then reads;
// `nontemporal`: by non-temporal stores.
double probe_handover(size_t bytes, bool nontemporal, int writer, int reader);

}  // namespace ringcomm
