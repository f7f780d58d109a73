"""Write the C source of ringcomm._native: include/ringcomm.h as cffi sees it. CMake calls this."""

import re
import subprocess
import sys
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).parents[1]


def declarations(compiler: str) -> str:
    """Return ringcomm.h preprocessed by this C compiler: cffi has no preprocessor, and knows the types of stdint.h."""
    header = (ROOT / "bindings" / "include" / "ringcomm.h").read_text()
    text = re.sub(r"^#include <.*$", "", header, flags=re.MULTILINE)
    command = [compiler, "-E", "-P", "-x", "c", "-I", str(ROOT), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main(output: str, compiler: str) -> None:
    ffi = FFI()
    ffi.cdef(declarations(compiler))
    # The callbacks into Python: waiting calls poll for signals; a large call between hosts needs its program.
    ffi.cdef('extern "Python" int ringcomm_interrupt(void);')
    ffi.cdef('extern "Python" int ringcomm_record(void* recorder, int collective, const rc_call* call);')
    ffi.set_source("ringcomm._native", '#include "ringcomm.h"', py_limited_api=True)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
