"""`ringcomm trace` on files that are written by hand, so that each number is known, and on the record of a failure."""

import json
import os
import re
import signal
import struct

import numpy as np
import pytest

import failures
import ringcomm
from ringcomm.commands.cli import main
from ringcomm.trace.dump import describe
from ringcomm.trace.entries import CLOCK, ENTRY, MARK, WAIT, read
from ringcomm.trace.recorder import HEADER_BYTES, VERSION
from ringcomm.types import COLLECTIVES, DTYPES

TICKS = 3_000_000  # in a millisecond


def entry(signature, start, end, **facts):
    row = np.zeros((), ENTRY)
    row["signature"], row["start"], row["end"], row["late"] = signature, start * TICKS, end * TICKS, -1
    for name, value in facts.items():
        row[name] = value
    return row.tobytes()


def call(name, start, end, waited=0, **facts):
    """Return an entry; times in ms. Arrays are of float32."""
    signature = COLLECTIVES[name].code | DTYPES["float32"] << 8
    return entry(signature, start, end, waited=waited * TICKS, waited_256=waited * TICKS // 256, **facts)


def wait(start, end):
    return entry(WAIT, start, end)


def mark(name, at):
    return struct.pack("<3Q40s", MARK, at * TICKS, at * TICKS + 1, name.encode())


def clock(at, ns):
    return entry(CLOCK, at, at + 1e-6, count=ns)


def write(folder, rank, *entries, host="h", behind=0, clocks=(0, 1000)):
    """Write the file of one of two ranks. The clock of its host is `behind`, in ms."""
    facts = {"version": VERSION, "group": "77", "rank": rank, "size": 2, "pid": rank + 100, "thread": 1, "host": host}
    looks = [clock(at, int((at + 10_000 - behind) * 1e6)) for at in clocks]
    data = [json.dumps(facts).encode().ljust(HEADER_BYTES), *looks[:1], *entries, *looks[1:], bytes(6400)]
    (folder / f"{rank}.trace").write_bytes(b"".join(data))


@pytest.fixture
def example(tmp_path):
    """A folder with the traces of two ranks in three steps, of which rank 1 is late once."""
    folder = tmp_path / "example"
    folder.mkdir()
    write(
        folder,
        0,
        mark("step", 0),
        call("all_reduce", 10, 50, count=1000, epoch=1, waited=30, late=1),
        mark("step", 100),
        call("all_reduce", 110, 190, count=1000, epoch=2, queued=1),
        wait(180, 190),
        mark("step", 200),
    )
    write(
        folder,
        1,
        mark("step", 0),
        call("all_reduce", 40, 50, count=1000, epoch=1),
        mark("step", 100),
        call("all_reduce", 110, 190, count=1000, epoch=2, queued=1),
        wait(170, 190),
        mark("step", 200),
        call("barrier", 210, 220, epoch=3, status=4),
    )
    return folder


def run(capsys, *arguments):
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_report(example, capsys):
    lines = [line.split() for line in run(capsys, example).splitlines()]
    assert " ".join(lines[0]) == "2 ranks, 1 group, 5 calls in 0.21 s; 1 failed"
    assert ["group", "77,", "2", "ranks"] in lines
    # rank, calls, seconds in calls, waiting, others waited for it
    assert ["0", "2", "0.12", "0.03", "0"] in lines
    assert ["1", "3", "0.1", "0", "0.03"] in lines
    # 16,000 bytes in 210 ms, less 30 of waiting; the bus factor of two ranks is 1
    assert ["all_reduce", "4", "16,000", "6e+04", "14%", f"{16000 / 0.18 * 1e-9:.3g}"] in lines
    assert ["barrier", "1", "0", "1e+04", "0%"] in lines
    # of two steps on two ranks: 40 + 10 + 10 + 20 of 400 ms; what is queued does not count, the wait for it does
    assert ["step", "4", "100", "20.0%"] in lines


def test_a_part_of_the_time(example, capsys):
    assert run(capsys, example, "--from", "0.105", "--until", "0.205").startswith(
        "2 ranks, 1 group, 2 calls in 0.08 s\n"
    )
    assert run(capsys, example, "--from", "0.3") == "no calls\n"


def test_the_file_for_perfetto(example, tmp_path, capsys):
    run(capsys, example, "-o", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0, process 100", "rank 1, process 101"]
    of_rank_0 = [event for event in events if event["pid"] == 0 and event["ph"] != "M"]
    assert [(event["ph"], event["name"], round(event["ts"])) for event in of_rank_0] == [
        ("i", "step", 0),
        ("X", "all_reduce", 10_000),
        ("i", "step", 100_000),
        ("b", "all_reduce", 110_000),
        ("e", "all_reduce", 190_000),
        ("X", "wait", 180_000),
        ("i", "step", 200_000),
    ]
    first = of_rank_0[1]
    assert first["dur"] == pytest.approx(40_000)
    assert first["args"]["waited (us)"] == pytest.approx(30_000)
    assert (first["args"]["waited for rank"], first["args"]["bytes"], first["args"]["epoch"]) == (1, 4000, 1)
    assert of_rank_0[3]["id"] == of_rank_0[4]["id"]
    assert [event["args"]["failed"] for event in events if event["name"] == "barrier"] == [True]


def test_a_picture(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(capsys, example, "--plot", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def times(recordings):
    return [[(round(call.start * 1e3), round(call.end * 1e3)) for call in each.calls] for each in recordings]


def test_the_clocks_of_hosts_are_aligned(tmp_path):
    # The clock of the other host is 7 s behind. Of three calls in which all wait for all, one ends late on it.
    write(
        tmp_path,
        0,
        *(call("barrier", epoch, 10 * epoch, epoch=epoch) for epoch in (1, 2, 3)),
        call("broadcast", 40, 50, epoch=4),
    )
    write(
        tmp_path,
        1,
        *(call("barrier", epoch, 10 * epoch + 5 * (epoch == 3), epoch=epoch) for epoch in (1, 2, 3)),
        call("broadcast", 41, 50, epoch=4),
        host="other",
        behind=7000,
    )
    assert times(read(tmp_path)) == [[(0, 9), (1, 19), (2, 29), (39, 49)], [(0, 9), (1, 19), (2, 34), (40, 49)]]


def test_hosts_without_a_common_call_keep_their_clocks(tmp_path):
    write(tmp_path, 0, call("barrier", 1, 10, epoch=1))
    write(tmp_path, 1, call("broadcast", 1, 10, epoch=1), host="other", behind=-70)
    assert times(read(tmp_path)) == [[(0, 9)], [(70, 79)]]


def test_ranks_of_one_host_share_its_clock(tmp_path):
    # Rank 1 was killed soon after its start, so its looks at the clock alone would tell little.
    write(tmp_path, 0, call("barrier", 1, 10, epoch=1))
    write(tmp_path, 1, call("barrier", 1, 10, epoch=1), clocks=(0, 5), behind=1)
    assert times(read(tmp_path)) == [[(0, 9)], [(0, 9)]]


# --- The record of a failure ------------------------------------------------------------------------------------------


def one_is_missing(comm):
    comm.barrier()
    if comm.rank == 0:
        comm.recv(np.ones(1), 2, timeout=1)
    comm.all_reduce(np.ones(5))


def differ(comm):
    comm.barrier()
    comm.all_reduce(np.ones(1 + comm.rank))


def test_a_timeout_leaves_the_record_of_all_ranks(tmp_path, capsys):
    with failures.mortals(3, [("RINGCOMM_DUMP", str(tmp_path / "dump"))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, one_is_missing):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    (file,) = (tmp_path / "dump").iterdir()  # one of all ranks
    text = run(capsys, file)
    assert text == describe(file)
    assert text.startswith("CollectiveTimeout: rank 0 waited 1 s for recv")
    sections = re.split(r"\n  rank (\d)\n", text)
    assert sections[1::2] == ["0", "1", "2"]
    for calls in sections[2::2]:
        assert "barrier() epoch 1, done" in calls
    # Whichever rank writes: the calls of some others may not have ended yet.
    assert re.search(r"recv\(float64 x 1, from 2\), (timed out|running)", sections[2])
    assert re.search(r"all_reduce\(float64 x 5, sum\) epoch 2, (timed out|running)", sections[4])
    assert "\n  ranks 0 and 2 wait for each other\n" in text


def test_a_mismatch_leaves_a_record(tmp_path):
    with failures.mortals(2, [("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, differ):
            assert isinstance(outcome, ringcomm.MismatchError)
    (file,) = tmp_path.iterdir()
    assert describe(file).startswith("MismatchError: the ranks called different things at epoch 2")


def die(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_a_lost_rank_leaves_a_record(tmp_path):
    with failures.mortals(3, [("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        outcomes = {rank: outcome for rank, outcome, _ in failures.outcomes(pool, die)}
    assert {type(outcomes[rank]) for rank in (0, 2)} == {ringcomm.PeerLost}
    (file,) = tmp_path.iterdir()
    assert re.match(r"PeerLost: rank 1 \(process \d+\) died", describe(file))
    assert "    dead" in describe(file)


def parts_fail(comm):
    part = comm.split(comm.rank % 2)
    if part.rank == 0:
        part.all_reduce(np.ones(3), timeout=0.5)
    part.recv(np.ones(1), 0, timeout=10)


def test_each_group_that_fails_leaves_a_record(tmp_path):
    with failures.mortals(4, [("RINGCOMM_DUMP", str(tmp_path))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, parts_fail):
            assert isinstance(outcome, ringcomm.CollectiveTimeout)
    texts = [describe(file) for file in tmp_path.iterdir()]
    assert len(texts) == 2
    assert all(len(re.findall("^group", text, re.MULTILINE)) == 2 for text in texts)  # the part, and the world


def test_a_failure_whose_record_cannot_be_written_is_raised_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    with failures.mortals(2, [("RINGCOMM_DUMP", str(tmp_path / "file"))]) as pool:
        for _, outcome, _ in failures.outcomes(pool, differ):
            assert isinstance(outcome, ringcomm.MismatchError)


def test_another_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("{}")
    assert main(["trace", str(tmp_path / "file")]) != 0
    assert "expected a flight record, as RINGCOMM_DUMP makes" in capsys.readouterr().err
