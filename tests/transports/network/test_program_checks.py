"""A program that would touch memory outside the arrays of its call is refused when it is added."""

from types import SimpleNamespace

import pytest

from cases.between_hosts import on_layouts
from harness.failures import check_usable
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.network.programs import CollectivePrograms

COUNT, SCRATCH = 20_000, 100
IN, OUT, MEMORY_OF_STEPS = lib.RC_MEMORY_IN, lib.RC_MEMORY_OUT, lib.RC_MEMORY_SCRATCH
COPY, EXCHANGE, LOCAL = lib.RC_STEP_COPY, lib.RC_STEP_EXCHANGE, lib.RC_STEP_LOCAL


def step(kind, outgoing, incoming, **fields):
    peers = {"dest": 2, "source": 2} if kind == EXCHANGE else {"dest": -1, "source": -1}
    return {"kind": kind, "outgoing": outgoing, "incoming": incoming, **peers, **fields}


def add(comm, name, *steps, counts=NULL, **fields):
    source, target = (ffi.new("char[]", comm.size * COUNT) for _ in range(2))
    call = {"source": source, "target": target, "count": COUNT, "dtype": lib.RC_UINT8, "root": 1, "counts": counts}
    arguments = {"number": 0, "scratch": SCRATCH, "steps": list(steps), "count": len(steps), **fields}
    check(lib.rc_add_program(comm._transport.handle, getattr(lib, f"RC_{name.upper()}"), [call], *arguments.values()))


def refused(comm, words, name, *steps):
    with pytest.raises(ArgumentError, match=words):
        add(comm, name, *steps)


A, B = (IN, 0, 10), (OUT, 10, 10)
REFUSED = {
    "a copy beyond its array": (
        step(COPY, (IN, COUNT - 5, 10), B),
        "outgoing: .* 20000 elements .*, got 10 from 19995",
    ),
    "a copy into too much scratch": (step(COPY, A, (MEMORY_OF_STEPS, 95, 10)), "incoming: .* 100 elements of memory 2"),
    "a copy that wraps": (step(COPY, A, (OUT, 2**64 - 5, 10)), "incoming: expected a block of"),
    "a copy into less": (step(COPY, A, (OUT, 0, 9)), "incoming: expected 10 elements, got 9"),
    "a copy during an exchange": (step(COPY, A, B, overlaps=1), "overlaps: expected 0"),
    "an exchange with itself": (step(EXCHANGE, A, B, dest=0), "dest: expected another rank, got 0 itself"),
    "an operand that is shorter": (step(EXCHANGE, A, B, operand=(IN, 0, 9)), "operand: expected 10 elements, got 9"),
    "a collective beyond its block": (
        step(LOCAL, A, B, collective=lib.RC_ALL_GATHER, count=10),
        "all_gather inside the host: expected blocks of 10 and 20 bytes, got 10 and 10 elements",
    ),
    "counts beyond their block": (
        step(LOCAL, A, B, collective=lib.RC_GATHER, counts=ffi.new("uint64_t[]", [10, 1])),
        "gather inside the host: expected blocks of 10 and 11 bytes",
    ),
    "an unknown collective": (step(LOCAL, A, B, collective=10**9), "there is no collective 1000000000"),
    "a root on another host": (step(LOCAL, A, B, collective=lib.RC_REDUCE, root=2), "root is 2"),
}


@on_layouts("0011")
def test_a_step_outside_its_memory_is_refused(comm):
    if comm.rank == 0:
        for wild, words in REFUSED.values():
            refused(comm, words, "all_reduce", wild)
        # What only the root passes is no memory of another rank, and only a reduction combines.
        words = "outgoing: expected a block of the 0 elements of memory 0"
        refused(comm, words, "scatter", step(COPY, A, (MEMORY_OF_STEPS, 0, 10)))
        words = "all_gather does not reduce"
        refused(comm, f"operand: {words}", "all_gather", step(EXCHANGE, A, B, dest=-1, source=2, operand=A))
        refused(comm, f"reduce: {words}", "all_gather", step(LOCAL, A, B, collective=lib.RC_REDUCE))
    check_usable(comm)


@on_layouts("01")
def test_ranks_that_share_no_memory_have_no_collective_inside_the_host(comm):
    refused(comm, "share no memory", "all_reduce", step(LOCAL, A, B, collective=lib.RC_ALL_REDUCE))


@on_layouts("0011")
def test_a_process_is_a_member_once(comm):
    transport, slot = comm._transport, ffi.new("rc_comm **")
    local, network = transport._local, transport._network.handle
    for members in ([0, 1, 2, 2], [0, 0, 2, 3]):
        arguments = (network, 9, comm.rank, 4, members, [0, 0, 1, 1], local.handle, NULL, local.tuning, slot)
        with pytest.raises(ArgumentError, match=r"rank \d is a member twice"):
            check(lib.rc_network_group(*arguments))


def test_a_collective_without_stages_is_refused_with_its_name():
    recorder = object.__new__(CollectivePrograms)
    recorder._call = SimpleNamespace(name="scan")
    with pytest.raises(RingcommError, match=r"^scan has no stages between hosts with several ranks$"):
        recorder.in_stages()
