"""Write the C source of ringcomm._native: include/ringcomm.h as cffi sees it. CMake calls this with the output path."""

import re
import sys
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "include" / "ringcomm.h"


def declarations(header: str) -> str:
    """Return the plain C declarations of `header`: cffi knows no preprocessor, and no C++."""
    plain_c = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^#.*$", "", plain_c, flags=re.MULTILINE)


def main(output: str) -> None:
    ffi = FFI()
    ffi.cdef(declarations(HEADER.read_text()))
    # The one way back into Python: asked now and then by a waiting call, whether a signal came (native.py defines it).
    ffi.cdef('extern "Python" int ringcomm_interrupt(void);')
    ffi.set_source("ringcomm._native", '#include "ringcomm.h"', py_limited_api=True)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(sys.argv[1])
