"""No call of the C ABI crashes: each checks its arguments, and refuses wild ones with a reason."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "bindings/include/ringcomm.h"
FUNCTIONS = re.findall(r"^[\w* ]+?\b(rc_\w+)\(", HEADER.read_text(), re.MULTILINE)
LEFT_OUT = {"rc_next_done", "rc_after_fork", "rc_set_interrupt"}  # waits; ends all communicators; takes any pointer

# Runs in a process of its own, which a wild call might end. Pointers to payloads are NULL: nobody can check their
# length. All other pointers are NULL or valid, all numbers are wild.
PROGRAM = r"""
import random
import sys

import numpy as np
import ringcomm
from ringcomm.native import ffi, lib

NUMBERS = {
    "double": [float("nan"), float("-inf"), float("inf"), -1.0, 0.0, 1e300],
    "int32_t": [-(2**31), -1, 0, 1, 2, 99, 2**31 - 1],
    "int64_t": [-(2**63), -1, 0, 1, 2**63 - 1],
    "uint32_t": [0, 1, 16, 4096, 2**32 - 1],
    "uint64_t": [0, 1, 3, 4096, 2**24, 2**45, 2**61, 2**62 + 1, 2**63, 2**64 - 1],
}
NUMBERS["int"] = NUMBERS["int32_t"]
WAITS = ("rc_recv", "rc_recv_at_most", "rc_recv_message", "rc_sendrecv", "rc_sendrecv_message", "rc_probe")
WAITS += ("rc_send_synchronous",)
STRUCTURES = ("rc_call", "rc_cuda_call", "rc_cuda_shape", "rc_tuning")
comm = ringcomm.init()
handle = comm._transport._host.handle
zeros = bytes(1 << 20)
space = ffi.new("char[]", len(zeros))  # of zeros, for what a function reads or writes
draw = random.Random(1)


def choose(kind):
    if kind.kind == "primitive":
        return draw.choice(NUMBERS[kind.cname])
    item = kind.item
    if item.cname == "struct rc_comm":
        return draw.choice([ffi.NULL, handle, handle, handle])
    if item.cname in STRUCTURES and draw.random() < 0.9:
        made = ffi.new(kind)
        for name, field in item.fields:
            if field.type.kind == "primitive":
                setattr(made, name, choose(field.type))
        return made
    if item.kind in ("void", "struct") or (item.kind == "pointer" and item.item.kind == "void"):
        return ffi.NULL
    return draw.choice([ffi.NULL, ffi.cast(kind, space), ffi.cast(kind, space)])


statuses = set()
for function in sys.argv[1:]:
    call = getattr(lib, function)
    for _ in range(30 if function.startswith("rc_probe_") else 300):  # a probe with valid numbers takes a while
        arguments = [choose(kind) for kind in ffi.typeof(call).args]
        if function in ("rc_free", "rc_close", "rc_abort", "rc_shrink") and handle in arguments:
            continue
        if function in WAITS and {-1, 0} & {argument for argument in arguments if isinstance(argument, int)}:
            continue  # it may be valid, and wait
        ffi.memmove(space, zeros, len(zeros))
        print(function, *arguments, file=sys.stderr, flush=True)
        status = call(*arguments)
        if ffi.typeof(call).result.cname == "int" and status == lib.RC_ARGUMENT and function != "rc_dtype_bytes":
            assert ffi.string(lib.rc_last_error().message)
            statuses.add(function)
x = np.ones(3)
comm.all_reduce(x)
comm.send(x, 0, async_op=True)
comm.recv(x, 0)
print("usable;", *sorted(statuses))
"""


@pytest.mark.slow
def test_wild_arguments_are_refused():
    functions = [name for name in FUNCTIONS if name not in LEFT_OUT]
    command = [sys.executable, "-c", PROGRAM, *functions]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.returncode, run.stderr[-1000:])
    assert run.stdout.startswith("usable;")
    refusing = {name for name in functions if re.search(rf"^int {name}\(", HEADER.read_text(), re.MULTILINE)}
    assert refusing - set(run.stdout.split()) == {"rc_dtype_bytes"}


def test_every_function_of_the_header_is_tried():
    assert len(FUNCTIONS) == len(set(FUNCTIONS)) > 35
    assert set(FUNCTIONS) >= LEFT_OUT
