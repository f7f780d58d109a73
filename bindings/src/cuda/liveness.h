// Notices the end of what work on a GPU needs: a peer that is lost, and the GPU itself.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace ringcomm {

// A peer may have done its part before it was lost: what is in flight then ends soon.
class PeerLoss {
public:
    // `lost`: whether the peer is lost now. Returns whether what is in flight can no longer end.
    bool is_final(bool lost);

private:
    uint64_t since_ = 0;  // ns; 0: it is not lost
};

// Why the context of a stream runs nothing any more; empty: it runs.
std::string broken_context(const Driver& driver, CUstream stream);

}  // namespace ringcomm
