"""Ranks that differ: every rank refuses other versions of ringcomm; all ranks use the settings of rank 0."""

import os
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

import harness
import ringcomm
from harness.failures import check_usable, raised
from ringcomm import ArgumentError, Config
from ringcomm.bootstrap.store import HashStore
from ringcomm.machine import topology
from ringcomm.native import ffi
from ringcomm.start import connect
from ringcomm.transports import shm
from ringcomm.version import VERSION


def connect_all(configs):
    """Return the communicator of every rank."""
    store = HashStore()
    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(lambda rank: connect(rank, len(configs), store, configs[rank]), range(len(configs))))


def differ(comm):
    with patch.object(shm, "VERSION", ["1.0", "1.1", "1.0"][comm.rank]):
        return str(raised(ArgumentError, lambda: ringcomm.init(harness.OPERATION)))


def test_different_versions_are_named_on_every_rank():
    text = "the ranks run different versions of ringcomm: 1.0 on ranks 0 and 2; 1.1 on rank 1"
    assert harness.run(differ, 3) == [text] * 3


def test_all_ranks_use_the_settings_of_rank_0():
    configs = [
        Config(
            timeout=harness.OPERATION,
            segment_bytes=4096,
            one_shot_bytes=0,
            nontemporal_bytes=64,
            cma_bytes=1 << 16,
            oversubscribed=True,
        ),
        Config(timeout=5.0, segment_bytes=1 << 16, one_shot_bytes=1 << 20, arena_bytes=1 << 22, oversubscribed=False),
        Config(timeout=harness.OPERATION, direct_bytes=1, nontemporal_bytes=1, sub_arena_bytes=1 << 14),
    ]
    comms = connect_all(configs)
    measured = {"cma_huge_bytes", "cores", "heap_bytes", "tree_wait_ns", "wake_ns"}  # no settings
    fields = {name for name, _ in ffi.typeof("rc_tuning").fields} - measured
    for comm in comms:
        tuning = comm._transport.tuning
        # In the core no size is 0: a setting of None.
        assert [getattr(tuning, name) for name in fields] == [getattr(configs[0], name) or 0 for name in fields]
        assert comm.timeout == harness.OPERATION

    def use(comm):
        with comm:
            check_usable(comm)
            group = comm.split(0)
            assert group.timeout == harness.OPERATION
            check_usable(group)
            symmetric = group.empty(300_001, "float32")
            symmetric[:] = comm.rank
            assert (group.all_reduce(symmetric, "max") == 2).all()

    with ThreadPoolExecutor(len(comms)) as pool:
        list(pool.map(use, comms))


@pytest.mark.parametrize("bound", ["apart", "together"])
def test_the_core_knows_how_many_cores_the_ranks_may_use(bound):
    first, *others = sorted(topology.cores())
    last = others[-1] if others and bound == "apart" else first
    tuning = {name: getattr(Config(), name, None) for name, _ in ffi.typeof("rc_tuning").fields}
    same = {"version": VERSION, "addresses": 1 << 30, "tuning": tuning, "topology": None}
    hellos = [same | {"cores": [core]} for core in (first, last)]
    reply, fd = shm._answer([0, 1], hellos)
    os.close(fd)
    assert reply["tuning"]["cores"] == len({first, last})
