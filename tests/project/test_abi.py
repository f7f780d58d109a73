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
NUMBERS["int32_t"] += [number for number in range(3, 18)]  # codes of dtypes, operations and collectives
NUMBERS["int"] = NUMBERS["int32_t"]
STRUCTURES = ("rc_call", "rc_cuda_call", "rc_cuda_shape", "rc_transfer", "rc_tuning")
comm = ringcomm.init()
handle = comm._transport.handle
zeros = bytes(1 << 20)
space = ffi.new("char[]", len(zeros))  # of zeros, for what a function reads or writes
counts = ffi.new("uint64_t[2]")  # of a group of one rank
draw = random.Random(1)


def choose(kind):
    if kind.kind == "primitive":
        return draw.choice(NUMBERS[kind.cname])
    if kind.kind == "function":
        return draw.choice([ffi.NULL, lib.ringcomm_record])
    item = kind.item
    if item.cname == "struct rc_comm":
        return draw.choice([ffi.NULL, handle, handle, handle])
    if item.cname in STRUCTURES and draw.random() < 0.9:
        made = ffi.new(kind)
        for name, field in item.fields:
            if field.type.kind == "primitive":
                setattr(made, name, choose(field.type))
            elif name == "counts":
                made.counts = draw.choice([ffi.NULL, counts])
        return made
    if item.kind in ("void", "struct") or (item.kind == "pointer" and item.item.kind == "void"):
        return ffi.NULL
    return draw.choice([ffi.NULL, ffi.cast(kind, space), ffi.cast(kind, space)])


statuses = set()
for function in sys.argv[1:]:
    call = getattr(lib, function)
    for _ in range(30 if function.endswith("_latency") else 300):  # one with valid numbers takes a while
        arguments = [choose(kind) for kind in ffi.typeof(call).args]
        if function in ("rc_free", "rc_close", "rc_abort", "rc_shrink") and handle in arguments:
            continue
        pointers = [each for each in arguments if isinstance(each, ffi.CData)]
        transfers = [each for each in pointers if ffi.typeof(each) is ffi.typeof("rc_transfer *")]
        if any(each and each.peer in (-1, 0) for each in transfers):
            continue  # it may be valid, and wait, or take the message below
        ffi.memmove(space, zeros, len(zeros))
        counts[0:2] = [draw.choice([0, 3, 2**63]) for _ in range(2)]
        print(function, *arguments, file=sys.stderr, flush=True)
        status = call(*arguments)
        if ffi.typeof(call).result.cname == "int" and status == lib.RC_ARGUMENT and function != "rc_dtype_bytes":
            assert ffi.string(lib.rc_last_error().message)
            statuses.add(function)
x = np.ones(3)
comm.all_reduce(x)
comm.send(x, 0, tag=7, async_op=True)  # not a wild tag: a call may have been valid
comm.recv(x, 0, tag=7)
print("usable;", *sorted(statuses))
"""

# Programs that are mostly valid, on two hosts of two ranks, which are threads. The arrays lie between guards.
PROGRAMS = r"""
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ringcomm.native import ffi, lib
from ringcomm.testing import connect_threads
from ringcomm.transports import network
from ringcomm.types import PUBLIC

RANKS, GUARD, LENGTHS = 4, b"guard" * 1000, (0, 1, 1000)
COLLECTIVES = [name for name in PUBLIC if name != "barrier"]
WILD = [-(2**31), -1, 3, 4, 11, 10**9, 2**31 - 1]
HUGE = [2**31, 2**61, 2**62 + 1, 2**63, 2**64 - 1]
threads = ThreadPoolExecutor(RANKS)


def connect(rank, size, store, config):
    return network.connect(rank, size, store, replace(config, host_id=str(rank // 2)))


def draw_block(draw, length):
    block = {"memory": draw.randrange(3), "begin": draw.choice([0, 0, 7]), "length": length}
    if draw.random() < 0.02:
        field, wild = draw.choice([("memory", WILD), ("begin", HUGE), ("length", HUGE)])
        block[field] = draw.choice(wild)
    return block


def draw_step(draw, rank, keep):
    length = draw.choice(LENGTHS)
    kind, codes = draw.randrange(3), list(range(len(PUBLIC)))
    step = {"kind": kind, "count": length, "collective": draw.choice(codes), "root": draw.randrange(2)}
    local = kind == lib.RC_STEP_LOCAL
    step["outgoing"], step["incoming"] = (draw_block(draw, 2 * length if local else length) for _ in range(2))
    peer = rank ^ draw.choice([1, 2, 3])
    step["dest"] = step["source"] = -1 if local else peer
    if kind == lib.RC_STEP_EXCHANGE and draw.random() < 0.5:
        step["operand"] = draw_block(draw, length)
    if draw.random() < 0.2:
        step["counts"] = ffi.new("uint64_t[4]", [draw.choice([0, length, length, 2**63]) for _ in range(4)])
        keep.append(step["counts"])
    step["overlaps"] = local and draw.random() < 0.3
    if draw.random() < 0.05:
        wild = ("kind", WILD), ("collective", WILD), ("root", WILD), ("dest", [*WILD, rank]), ("source", [*WILD, rank])
        field, values = draw.choice([*wild, ("count", HUGE), ("overlaps", [1])])
        step[field] = draw.choice(values)
    return step


def add(end, trial, code):
    # Returns the status, the call, and the memory of its arrays.
    draw, own, keep = random.Random(trial), random.Random(f"{trial} {end.rank}"), []
    count = 20_000 + trial  # a new one: the program of a call is added once
    memory = [ffi.new("char[]", GUARD + bytes(RANKS * count) + GUARD) for _ in range(2)]
    source, target = (each + len(GUARD) for each in memory)
    call = {"source": source, "target": target, "count": count, "dtype": lib.RC_UINT8, "root": draw.randrange(RANKS)}
    steps = [draw_step(draw, end.rank, keep) for _ in range(draw.randrange(1, 6))]
    if own.random() < 0.1:
        steps[0] = draw_step(own, end.rank, keep)
    scratch = draw.choice(HUGE) if draw.random() < 0.02 else 10_000
    status = lib.rc_add_program(end.handle, code, [call], 0, scratch, steps, len(steps))
    assert status in (lib.RC_OK, lib.RC_MEMORY) or ffi.string(lib.rc_last_error().message)
    return status, call, memory


ends, refused, ran = [], 0, 0
for trial in range(int(sys.argv[1])):
    ends = ends or connect_threads(connect, RANKS, 30)
    name = random.Random(trial).choice(COLLECTIVES)
    code = getattr(lib, "RC_" + name.upper())
    print(trial, name, file=sys.stderr, flush=True)
    added = [add(end, trial, code) for end in ends]
    if any(status for status, _, _ in added):
        refused += 1
        continue
    calls = [(end.handle, code, [call], 0.3, ffi.NULL) for end, (_, call, _) in zip(ends, added)]
    statuses = list(threads.map(lambda call: lib.rc_collective(*call), calls))
    for _, _, memory in added:
        texts = [ffi.unpack(each, len(each) - 1) for each in memory]
        assert all(text.startswith(GUARD) and text.endswith(GUARD) for text in texts)
    if any(statuses):
        for end in ends:
            end.close()
        ends = []
    else:
        ran += 1
print(refused, ran)
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


@pytest.mark.slow
def test_wild_programs_are_refused_or_touch_no_memory_but_that_of_their_call():
    command = [sys.executable, "-c", PROGRAMS, "60"]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.returncode, run.stderr[-1000:])
    refused, ran = map(int, run.stdout.split())
    assert refused > 20
    assert ran > 7


# Where a conversion of the divisor would be undefined, and what the average of 7 and 8 is then.
AVERAGES = r"""
import sys

from ringcomm.native import ffi, lib

for level in (b"portable", b"avx2", b"avx512"):
    if lib.rc_kernels_select(level) != lib.RC_OK:
        continue
    for dtype in (lib.RC_UINT8, lib.RC_INT16, lib.RC_UINT32, lib.RC_INT64, lib.RC_UINT64):
        for factor, average in ((1e308, 0), (2.0**63, 0), (float("inf"), 0), (-1e308, 15), (float("nan"), 15)):
            item = lib.rc_dtype_bytes(dtype)
            first, second = (ffi.new("char[]", number.to_bytes(item, sys.byteorder) * 9) for number in (7, 8))
            assert lib.rc_reduce(first, [first, second], 2, 9, dtype, lib.RC_AVG, factor) == lib.RC_OK
            assert ffi.unpack(first, 9 * item) == average.to_bytes(item, sys.byteorder) * 9, (level, dtype, factor)
"""


def test_an_average_by_a_factor_that_no_integer_holds_is_defined():
    run = subprocess.run([sys.executable, "-c", AVERAGES], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


BLOCKS_WITHOUT_A_POINTER = r"""
from ringcomm.native import ffi, lib
import ringcomm

comm = ringcomm.init()
for name, count, counts in (("all_gather", 0, [5]), ("scatter", 0, [5]), ("broadcast", 0, [5, 5]), ("split", 5, None)):
    counts = ffi.NULL if counts is None else ffi.new("uint64_t[]", counts)
    call = {"count": count, "dtype": lib.RC_UINT8, "counts": counts}
    handle = comm._transport.handle
    status = lib.rc_collective(handle, getattr(lib, "RC_" + name.upper()), [call], -1.0, ffi.NULL)
    assert status == lib.RC_ARGUMENT, name
    print(ffi.string(lib.rc_last_error().message).decode())
"""


def test_a_pointer_is_needed_for_what_the_counts_say():
    run = subprocess.run([sys.executable, "-c", BLOCKS_WITHOUT_A_POINTER], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    no_source = "source: expected a pointer, got NULL"
    assert run.stdout.splitlines() == [
        no_source,
        no_source,
        "counts: expected NULL, since broadcast does not divide its arrays",
        no_source,
    ]


def test_every_function_of_the_header_is_tried():
    assert len(FUNCTIONS) == len(set(FUNCTIONS)) > 35
    assert set(FUNCTIONS) >= LEFT_OUT
