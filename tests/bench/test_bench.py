"""What `ringcomm bench` measures: every row of its table verifies, wrong results are found, options are checked."""

import argparse
from dataclasses import fields

import numpy as np
import pytest
from test_shared_arrays import get_handler_name

import harness
from cases import reference
from ringcomm import ArgumentError
from ringcomm.bench import comparison, report, starts
from ringcomm.bench.command import add_arguments, sweep_of
from ringcomm.bench.job import failure_reason
from ringcomm.bench.rank.collectives import COLLECTIVES, REDUCTIONS, RankCase, count_wrong, fill
from ringcomm.bench.rank.measure import RankBench
from ringcomm.bench.rank.ringcomm import RingcommLibrary

OPTIONS = {
    "dtype": "float32",
    "op": "sum",
    "root": 0,
    "in_place": True,
    "pool": 1 << 16,
    "memory": "private",
    "asynchronous": False,
}


def wrong_of(runs, device="host"):
    """Measure runs of (collective, counts, changed options) on three threads; return those with wrong elements."""

    def rank(comm):
        wrong = []
        for name, counts, changes in runs:
            it = RankBench(RingcommLibrary(comm, device))
            for count in counts:
                it.prepare(name, OPTIONS | {"count": count} | changes)
                assert it.round(True, 1, 3) > 0
                assert it.round(False, 1, 3) > 0
                wrong.append((it.check(), name, count, changes))
        assert device == "host" or comm._router.name == "shm+cuda_ipc"
        return [run for number, *run in wrong if number]

    return harness.run(rank, 3, world="threads")


FORMS = [
    (name, in_place)
    for name, row in COLLECTIVES.items()
    for in_place in [True] * row.in_place + [False] * row.out_of_place
]
MEMORY = [(device, memory) for device in ("host", "emulated") for memory in ("private", "symmetric")]


@pytest.mark.parametrize(("device", "memory"), [*MEMORY, ("host", "shared")])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_every_collective_runs_and_verifies(asynchronous, device, memory):
    counts, pool = ([1, 999, 30_000], 1 << 16) if device == "host" else ([1, 1500], 9000)
    options = {"memory": memory, "asynchronous": asynchronous, "pool": pool, "root": 1}
    runs = [(name, [0] if name == "barrier" else counts, options | {"in_place": in_place}) for name, in_place in FORMS]
    assert wrong_of(runs, device) == [[]] * 3


KINDS = ("bool", "int8", "uint64", "float16", "bfloat16", "float64", "complex64")
PAIRS = [(dtype, op) for dtype, op in reference.COMBINATIONS if dtype in KINDS and op in REDUCTIONS]


def test_every_operation_verifies():
    assert wrong_of([("all_reduce", [1000], {"dtype": dtype, "op": op}) for dtype, op in PAIRS]) == [[]] * 3


def test_results_of_earlier_calls_do_not_count_as_new_ones():
    class Tired(RingcommLibrary):
        def call(self, *arguments):
            call, result = super().call(*arguments)
            calls = iter([call])  # the first time only
            return lambda: next(calls, int)(), result

    def rank(comm):
        wrong = {}
        for name, in_place in FORMS:
            if name != "barrier":
                it = RankBench(Tired(comm))
                it.prepare(name, OPTIONS | {"count": 1000, "in_place": in_place, "pool": 0})
                wrong[name, in_place] = it.check()
        return wrong

    one, other = harness.run(rank, 2, world="threads")
    assert all(wrong + other[form] > 900 for form, wrong in one.items()), (one, other)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "barrier"])
def test_the_first_calls_after_a_start_end_with_the_same_one_on_all_ranks(name, tmp_path):
    def rank(comm):
        it = RankBench(RingcommLibrary(comm), str(tmp_path))
        rounds = []
        it.round = lambda *arguments: rounds.append(arguments) or RankBench.round(it, *arguments)
        first, settled, wrong = it.start(name, OPTIONS | {"count": 100 * (name != "barrier"), "pool": 0}, 0.5, 0.01)
        assert min(first, settled) > 0
        return rounds, wrong

    (rounds, wrong), *others = harness.run(rank, 3, world="threads")
    assert (rounds[:4], wrong) == ([(True, 0, 1), (False, 0, 1), (False, 0, 2), (False, 0, 4)], 0)
    assert others == 2 * [(rounds, 0)]


def test_shared_arrays_are_those_that_numpy_makes():
    def rank(comm):
        array = RingcommLibrary(comm).memory("shared", 1 << 16)
        return type(array), get_handler_name(array)

    assert harness.run(rank, 2, world="threads") == 2 * [(np.ndarray, "ringcomm.shared_arrays")]


def test_buffers_rotate_through_the_pool():
    def rank(comm):
        it = RankBench(RingcommLibrary(comm))
        it.prepare("all_reduce", OPTIONS | {"count": 1000, "pool": 1 << 16})
        return len(it.calls), next(iter(it.pools.values())).nbytes

    assert harness.run(rank, 2, world="threads")[0] == ((1 << 16) // 4032, 1 << 16), "4,000 bytes take 63 lines"


def test_wrong_elements_are_counted():
    setting = RankCase(rank=1, size=2, count=1000, dtype=np.dtype("int32"), op="sum", root=0)
    array = np.empty((2, 1000), np.int32)
    fill(array, setting)
    expected = [setting.wave(1, block=0), setting.wave(1, block=1)]
    assert count_wrong(array, expected) == 0
    array[0, 3] += 1
    array[1, -1] += 1
    assert count_wrong(array, expected) == 2
    assert count_wrong(np.roll(array, 64), expected) > 1000, "a displaced block must not look right"


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_the_expected_result_is_the_loop_over_the_ranks(op):
    setting = RankCase(rank=0, size=5, count=100, dtype=np.dtype("float32"), op=op, root=0)
    inputs = [np.resize(setting.wave(rank), 1000) for rank in range(5)]
    result = inputs[0]
    for other in inputs[1:]:
        result = REDUCTIONS[op](result, other)
    np.testing.assert_array_equal(np.resize(setting.reduced(), 1000), result)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1)],
)
def test_bus_factors_are_those_of_nccl_tests(name, factor):
    assert COLLECTIVES[name].bus_factor(4) == factor


def parse(words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words.split())


@pytest.mark.parametrize(
    "words",
    [
        *("-b 0", "-f 1", "-n 0", "-w -1", "-c 2", "--op median", "--dtype float31", "COLLECTIVE all_reduse"),
        *("--ranks 2,0", "--root -1", "--timeout 0", "--vs gloo,gloom"),
        "--shared-arrays --symmetric",
    ],
)
def test_unparsable_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse(words.removeprefix("COLLECTIVE "))
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_reduce -b 1M -e 1K", "expected -b <= -e, got 1048576 > 1024 bytes"),
        ("broadcast --ranks 2,4 --root 2", "--root: expected 0 to 1 with 2 ranks, got 2"),
        ("all_reduce all_gather --root 1", "--root: expected a rooted collective, got all_reduce, all_gather"),
        ("reduce --dtype float64,float32 --op sum,band", "--op: band is not defined for float64 in host memory"),
        ("all_reduce --dtype bool --op avg", "--op: avg is not defined for bool in host memory"),
        ("all_reduce --shared-arrays --device cuda", "--shared-arrays: expected --device host, got cuda"),
        ("all_reduce --dtype float8_e5m2", "--op: sum is not defined for float8_e5m2 in host memory"),
    ],
)
def test_invalid_plans_are_refused_before_anything_starts(words, message):
    with pytest.raises(ArgumentError) as refusal:
        sweep_of(parse(words)).require(1)
    assert message in str(refusal.value)


def test_each_case_has_whole_blocks_and_occurs_once():
    cases = sweep_of(parse("all_gather all_reduce barrier -b 4 -e 100 -f 2")).cases(3)
    assert [case.count for case in cases if case.collective == "all_gather"] == [1, 2, 5]
    assert [case.bytes for case in cases if case.collective == "all_gather"] == [12, 24, 60]
    assert [case.count for case in cases if case.collective == "all_reduce"] == [1, 2, 4, 8, 16]
    assert [case.count for case in cases if case.collective == "barrier"] == [0]


def test_dtypes_and_operations_follow_one_another_at_each_size():
    cases = sweep_of(parse("all_reduce broadcast -b 8 -e 16 -f 2 --dtype float32,float16 --op sum,max")).cases(2)
    assert [(case.bytes, case.dtype, case.op) for case in cases if case.collective == "all_reduce"][:4] == [
        *((8, "float32", "sum"), (8, "float32", "max"), (8, "float16", "sum"), (8, "float16", "max"))
    ]
    assert len(cases) == 2 * 4 + 2 * 2, "the operation means nothing to broadcast"


KILLED_BEFORE_OTHERS = """\
ringcomm run: rank 0 was killed by SIGKILL
[1] Traceback (most recent call last):
[1]     return self.round(True, 0, 1)
[1] RuntimeError: Connection reset by peer
"""
RAISED_BEFORE_OTHERS = """\
[0] Traceback (most recent call last):
[0]     raise refuse(variable, EXPECTED[parse], repr(text)) from None
ringcomm run: rank 0 exited with status 1
[0] ringcomm.errors.ArgumentError: RINGCOMM_TIMEOUT: expected a number, got 'soon'
[1] ringcomm.errors.PeerLost: rank 0 died
"""
OPEN_MPI = """\
----------------------------------------
prterun noticed that process rank 1 with PID 26164 on node vm exited on
signal 9 (Killed).
----------------------------------------
"""
MPICH = """\
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
Please see the FAQ page for debugging suggestions
"""
FATAL = """\
Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
ModuleNotFoundError: No module named 'encodings'

Current thread 0x00007feda7413b80 (most recent call first):
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (KILLED_BEFORE_OTHERS, "ringcomm run: rank 0 was killed by SIGKILL"),
        (RAISED_BEFORE_OTHERS, "[0] ringcomm.errors.ArgumentError: RINGCOMM_TIMEOUT: expected a number, got 'soon'"),
        (OPEN_MPI, "signal 9 (Killed)."),
        (MPICH, "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"),
        (FATAL, "ModuleNotFoundError: No module named 'encodings'"),
        ("[0] python is broken\nringcomm run: rank 0 exited with status 3\n[1] so\n", "[0] python is broken"),
        ("ringcomm run: rank 0 exited with status 3\n", "ringcomm run: rank 0 exited with status 3"),
        ("ValueError: " + "word " * 100, "ValueError:" + " word" * 37 + " …"),
        ("----\n\n", ""),
    ],
)
def test_the_reason_of_a_failure_is_the_line_that_explains_it(log, words):
    assert failure_reason(log) == words


def row(library, median, buffers="rotated", wrong=0):
    spread = {"p10": 0.9 * median, "p90": 1.1 * median, "p99": 1.2 * median}
    facts = dict.fromkeys((field.name for field in fields(comparison.Measurement)), 1)
    return comparison.Measurement(
        **facts | spread | {"library": library, "median": median, "buffers": buffers, "wrong": wrong}
    )


def test_the_best_peer_is_the_fastest_correct_one_with_each_kind_of_buffers():
    rows = [row("ringcomm", 1), row("gloo", 9), row("openmpi", 3), row("openmpi/multiple", 2), row("mpich", 1, wrong=3)]
    rows += [row("ringcomm", 1, "cached"), row("gloo", 4, "cached")]
    best = report.best_peers(rows)
    assert {kind: m.library for kind, m in best.items()} == {"rotated": "openmpi/multiple", "cached": "gloo"}


def test_a_variant_is_shown_where_it_differs():
    rows = [row("openmpi", 1.0), row("openmpi/multiple", 1.1)]
    assert [m.library for m in report.shown(rows)] == ["openmpi"]
    rows = [row("openmpi", 1.0), row("openmpi/multiple", 1.5)]
    assert len(report.shown(rows)) == 2


class FreshRanks:
    """Two ranks, and their answers after each start."""

    name, versions = "ringcomm", {}

    def __init__(self, *answers):
        self.answers = iter(answers)

    def request(self, name, collective, options, seconds, round_seconds):
        assert (name, collective, options["count"], options["pool"]) == ("start", "all_reduce", 256, 0)
        assert (seconds, round_seconds) == (0.3, 0.005)
        return next(self.answers)


def test_of_unbound_ranks_the_usual_time_and_the_worst_start_are_told():
    sweep = sweep_of(parse("all_reduce -b 1K -e 1K -n 3 --unbound"))
    ranks = FreshRanks([(2e-6, 1e-6, 0), (3e-6, 1e-6, 0)], [(9e-6, 4e-6, 0), (2e-6, 1e-6, 0)], [(4e-6, 2e-6, 5)] * 2)
    [[found]] = starts.Starts(sweep, 2, "bound to no core", 2, [ranks]).measure()
    assert (found.median, found.worst, found.settled) == (4e-6, 9e-6, 2e-6), "of the slowest rank"
    assert (found.rounds, found.wrong) == (3, 10)
    assert report.starts_text([found]).split()[5:] == ["ringcomm", "2.00", "4.00", "9.00", "4.50", "10"]


def test_a_line_per_library_has_a_cell_for_each_column():
    rows = [row("ringcomm", 2e-6), row("ringcomm", 1e-6, "cached"), row("gloo", 8e-6), row("gloo", 5e-6, "cached")]
    ours, theirs = (line.split() for line in report.rows_text(rows).splitlines())
    assert len(ours) == len(report.COLUMNS)
    assert ours[5:7] == ["ringcomm", "2.00"]
    assert (ours[13], ours[16]) == ("4.00", "5.00")
    assert theirs[5:7] == ["gloo", "8.00"]
