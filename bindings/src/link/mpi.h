// MPI as the library of a MessageLink. It is the MPI that Python has loaded: its functions are called by their
// addresses, so that one build serves every MPI, whether its handles are ints or pointers.
#pragma once

#include <memory>

#include "link/message_library.h"
#include "ringcomm.h"

namespace ringcomm {

// Messages have at most 1 GiB, since MPI counts with ints. Until MPI is finalized.
std::unique_ptr<MessageLibrary> mpi_messages(const rc_mpi& mpi);

}  // namespace ringcomm
