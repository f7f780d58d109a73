"""When a trace begins and ends, in which file, and what a failure leaves of it."""

import os
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

import harness
import ringcomm
from harness import failures
from harness.jobs import run_job
from ringcomm.trace.entries import read
from ringcomm.trace.recorder import HEADER_BYTES


def facts(recording, *names):
    return [tuple(getattr(call, name) for name in names) for call in recording.calls]


def two_in_a_row(comm, first, second):
    with comm.trace(first):
        comm.barrier()
    with comm.trace(first):
        comm.all_reduce(np.ones(1))
        with comm.trace(second):  # interrupts the other
            comm.broadcast(np.ones(1))
        comm.all_gather(np.ones(1))
    comm.barrier()


def test_traces_in_a_row_and_inside_each_other(tmp_path):
    harness.run(two_in_a_row, 2, tmp_path / "first", tmp_path / "second")
    for each in read(tmp_path / "first"):
        assert [call.name for call in each.calls] == ["barrier", "all_reduce", "all_gather"]
    for each in read(tmp_path / "second"):
        assert [call.name for call in each.calls] == ["broadcast"]


def inside_the_variable(comm, folder):
    part = comm.split(0)  # a communicator whose calls the variable traces
    part.barrier()
    with part.trace(folder):
        part.all_reduce(np.ones(1))
    part.all_gather(np.ones(1))
    part.close()


def test_a_trace_interrupts_that_of_the_variable(tmp_path):
    with harness.world(2, settings=[("RINGCOMM_TRACE", str(tmp_path / "outer"))]) as pool:
        pool.run(inside_the_variable, (tmp_path / "inner",))
    parts = [each for each in read(tmp_path / "outer") if each.calls[0].name == "barrier"]
    assert [facts(each, "name") for each in parts] == [[("barrier",), ("all_gather",)]] * 2
    assert [facts(each, "name") for each in read(tmp_path / "inner")] == [[("all_reduce",)]] * 2


def failing(comm, folder):
    with comm.trace(folder):
        comm.barrier()
        with pytest.raises(ringcomm.MismatchError):
            comm.all_reduce(np.ones(1 + comm.rank))
        with pytest.raises(ringcomm.ArgumentError):
            comm.broadcast(np.ones(1), root=9)  # nothing was sent
        comm.barrier()


def test_calls_that_fail_are_flagged(tmp_path):
    harness.run(failing, 2, tmp_path)
    for each in read(tmp_path):
        assert facts(each, "name", "failed") == [("barrier", False), ("all_reduce", True), ("barrier", False)]


def killed(comm, folder):
    with comm.trace(folder):
        comm.barrier()
        comm.mark("last")
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()


def test_the_file_of_a_killed_rank_is_readable(tmp_path, caplog):
    with harness.world(2) as pool:
        outcomes = {rank: outcome for rank, outcome, _ in failures.outcomes(pool, killed, tmp_path)}
    assert isinstance(outcomes[0], ringcomm.PeerLost)
    survivor, victim = read(tmp_path)
    assert facts(victim, "name", "failed") == [("barrier", False), ("last", False)]
    assert facts(survivor, "name", "failed") == [("barrier", False), ("last", False), ("barrier", True)]
    assert survivor.calls[0].start <= victim.calls[0].end + 1e-3
    assert not caplog.records  # a file of its length is not taken for one that was cut short


def closed_inside(comm, folder):
    part = comm.split(0)
    with part.trace(folder):
        part.barrier()
        part.close()
    with pytest.raises(ringcomm.ArgumentError, match="closed"):
        part.mark("too late")


def test_closing_ends_a_trace(tmp_path):
    harness.run(closed_inside, 2, tmp_path)
    assert [facts(each, "name") for each in read(tmp_path)] == [[("barrier",)]] * 2


def full(comm, folder):
    """Trace where a file may have 1 MiB and the header, and then where it may not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    x = np.ones(1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + HEADER_BYTES, limits[1]))
        with comm.trace(folder):
            for _ in range(20_000):
                comm.all_reduce(x, "max")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
        with pytest.raises(ringcomm.ArgumentError) as refused, comm.trace(folder / "more"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    failures.check_usable(comm)
    return str(refused.value)


def test_a_full_disk(tmp_path):
    for text in harness.run(full, 2, tmp_path):
        assert text == f"cannot write a trace to {tmp_path / 'more'}: extending its file: File too large"
    for each in read(tmp_path):
        assert len(each.calls) + each.dropped == 20_000
        assert 16_000 < len(each.calls) <= 1 << 14  # less the looks at the clock
    assert not [*(tmp_path / "more").iterdir()]


def addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.ranks(2, world="processes")
def test_a_trace_that_has_ended_keeps_few_addresses(comm, tmp_path):
    before = addresses()
    for _ in range(10):
        with comm.trace(tmp_path):
            comm.barrier()
    assert addresses() - before < 100 << 20


def unwritable(comm, file):
    with pytest.raises(ringcomm.ArgumentError, match=r"cannot write a trace to .*file"), comm.trace(file):
        pass
    with pytest.raises(ringcomm.ArgumentError, match="cannot write a trace to /proc"), comm.trace("/proc/none"):
        pass
    for other in (3, "", None):
        with pytest.raises(ringcomm.ArgumentError, match="folder: expected a folder, got"), comm.trace(other):
            pass
    failures.check_usable(comm)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    harness.run(unwritable, 2, tmp_path / "file")


def test_the_variable_is_named_if_its_folder_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGCOMM_TRACE", str(tmp_path / "file"))
    with pytest.raises(ringcomm.ArgumentError, match=r"/file, where RINGCOMM_TRACE points: File exists"):
        ringcomm.init()


def test_a_group_that_is_opened_later_goes_on_untraced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RINGCOMM_TRACE", str(tmp_path / "trace"))
    with ringcomm.init() as comm:
        (tmp_path / "trace").rename(tmp_path / "moved")
        (tmp_path / "trace").touch()
        parts = [comm.split(0), comm.split(0)]
        for part in parts:
            part.barrier()
            part.close()
        comm.mark("end")
    (warning,) = caplog.records
    assert re.fullmatch(
        "cannot write a trace to .*/trace, where RINGCOMM_TRACE points: .*; groups without a file there are not traced",
        warning.getMessage(),
    )
    (recording,) = read(tmp_path / "moved")
    assert recording.calls[-1].name == "end"


PROGRAM = """
import os
import numpy as np
import ringcomm

with ringcomm.init() as comm:
    part = comm.split(comm.rank % 2)
    comm.all_reduce(np.ones(4))
    part.barrier()
    if os.fork() == 0:
        try:
            comm.mark("of a child")
        except ringcomm.ArgumentError:
            os._exit(0)
    assert os.wait()[1] == 0
    comm.mark("step")
"""


def test_the_variable_traces_all_communicators_of_a_job(tmp_path):
    run_job(tmp_path, 3, PROGRAM, RINGCOMM_TRACE=str(tmp_path / "trace"))
    recordings = read(tmp_path / "trace")
    assert [(each.size, each.rank) for each in recordings[:3]] == [(3, 0), (3, 1), (3, 2)]
    assert {(each.size, each.rank) for each in recordings[3:]} == {(2, 0), (2, 1), (1, 0)}
    for each in recordings[:3]:
        assert [call.name for call in each.calls if call.name != "split"] == ["all_reduce", "step"]
    for each in recordings[3:]:
        assert [call.name for call in each.calls] == ["barrier"]
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "trace").iterdir())  # of this user only


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ringcomm.ArgumentError, match="expected one with traces of calls"):
        read(tmp_path)
    with pytest.raises(ringcomm.ArgumentError, match="expected one with traces of calls"):
        read(tmp_path / "missing")
    (tmp_path / "x.trace").write_bytes(b"other")
    with pytest.raises(ringcomm.ArgumentError, match=r"expected a trace, got .*x\.trace"):
        read(tmp_path)
    (tmp_path / "x.trace").write_bytes(b'{"version": 99}')
    with pytest.raises(ringcomm.ArgumentError, match="expected 4, got 99"):
        read(tmp_path)
