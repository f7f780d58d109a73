// The kinds of dtypes, for types.def. They are flags: an operation is defined for a set of them.
#pragma once

namespace ringcomm {

enum Kind { TRUTH = 1, INTEGER = 2, REAL = 4, COMPLEX = 8 };

}  // namespace ringcomm
