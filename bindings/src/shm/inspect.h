// A look at a group from outside: for `ringcomm top`.
#pragma once

#include <vector>

#include "ringcomm.h"

namespace ringcomm {

// The ranks of the group whose arena lies at `offset` in the file; none if there is no arena. Only reads.
std::vector<rc_rank_view> inspect(int fd, uint64_t offset, int most);

}  // namespace ringcomm
