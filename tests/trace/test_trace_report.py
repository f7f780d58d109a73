"""`ringcomm trace` on files that are written by hand, so that each number is known."""

import json
import os

import numpy as np
import pytest
from trace_files import call, mark, run, wait, write

from ringcomm.commands.cli import main
from ringcomm.trace.entries import read
from ringcomm.trace.files import ENTRY
from ringcomm.trace.recorder import DROPPED, HEADER_BYTES, PIECE_BYTES, VERSION


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


def test_the_report(example, capsys):
    lines = [line.split() for line in run(capsys, example).splitlines()]
    assert " ".join(lines[0]) == "2 ranks, 1 group, 5 calls in 0.21 s; 1 failed"
    assert ["group", "77,", "2", "ranks;", "memcpy", "0.001", "GB/s"] in lines
    # rank, calls, seconds in calls, waiting, others waited for it
    assert ["0", "2", "0.12", "0.03", "0"] in lines
    assert ["1", "2", "0.09", "0", "0.03"] in lines  # without the barrier that failed
    # 16,000 bytes in 210 ms, less 30 of waiting; the bus factor of two ranks is 1, and memcpy copies 1 MB/s
    assert ["all_reduce", "4", "16,000", "6e+04", "14%", f"{16000 / 0.18 * 1e-9:.3g}", "9%"] in lines
    assert not any(line[:1] == ["barrier"] for line in lines)
    # of two steps on two ranks: 40 + 10 + 10 + 20 of 400 ms; what is queued does not count, the wait for it does
    assert ["step", "4", "100", "20.0%"] in lines


def test_calls_without_room_are_counted(tmp_path, capsys):
    write(tmp_path, 0, call("barrier", 1, 10, epoch=1), dropped=1000)
    write(tmp_path, 1, call("barrier", 1, 10, epoch=1), dropped=234)
    first = run(capsys, tmp_path).splitlines()[0]
    assert first == "2 ranks, 1 group, 2 calls in 0.009 s; there was no room for 1,234 more"


def test_between_hosts_memcpy_is_no_measure(tmp_path, capsys):
    write(tmp_path, 0, call("all_reduce", 1, 10, count=1000, epoch=1))
    write(tmp_path, 1, call("all_reduce", 1, 10, count=1000, epoch=1), host="other")
    assert "memcpy" not in run(capsys, tmp_path)


def test_who_waits_for_a_waiting_rank_waits_for_its_cause(tmp_path, capsys):
    # In the first call rank 0 waits for 1, which waits for 2, which waits for 3. In the second one 0 and 1 wait for
    # each other, and 2 for 3, which itself waits for 0 only a moment.
    waits = [[(30, 1), (2, 1)], [(29, 2), (2, 0)], [(28, 3), (20, 3)], [(1, 2), (1, 0)]]
    for rank, ((first, late), (second, later)) in enumerate(waits):
        write(
            tmp_path,
            rank,
            call("barrier", 0, 40, epoch=1, waited=first, late=late),
            call("barrier", 50, 90, epoch=2, waited=second, late=later),
            size=4,
        )
    lines = [line.split() for line in run(capsys, tmp_path).splitlines()]
    made_wait = [line[4] for line in lines if line and line[0] in "0123" and len(line) == 5]
    assert made_wait == ["0.002", "0.003", "0.001", "0.107"]


def test_who_did_not_come_to_a_failed_call_is_not_guessed(tmp_path, capsys):
    write(tmp_path, 0, call("barrier", 1, 2), call("barrier", 3, 9, waited=5, late=1, status=1))
    write(tmp_path, 1, call("barrier", 1, 2))
    lines = run(capsys, tmp_path).splitlines()
    assert lines[0] == "2 ranks, 1 group, 3 calls in 0.008 s; 1 failed"
    assert [line.split()[-1] for line in lines[4:6]] == ["0", "0"]


def test_calls_and_steps_may_take_no_time(tmp_path, capsys):
    write(tmp_path, 0, call("barrier", 1, 1), mark("step", 2), mark("step", 2))
    text = run(capsys, tmp_path)
    assert "0%" in text
    assert "0.0%" in text


def test_a_file_whose_clock_is_damaged_is_left_out(tmp_path, capsys, caplog):
    write(tmp_path, 0, call("barrier", 1, 2))
    write(tmp_path, 1, call("barrier", 1, 2), host="other", clocks=())
    assert "no trace of rank 1 (of 2)" in run(capsys, tmp_path)
    assert "left out: all entries of host other, as its clock samples are damaged" in caplog.text


def test_a_mark_with_a_line_break_stays_in_its_line(tmp_path, capsys):
    for rank in range(2):
        write(tmp_path, rank, mark("ein\nSchritt ü", 0), call("barrier", 1, 2, epoch=1), mark("ein\nSchritt ü", 10))
    assert "\n  ein\\nSchritt ü         2            10                   10.0%\n" in run(capsys, tmp_path)


def test_a_damaged_file_does_not_spoil_the_others(example, capsys, caplog):
    (example / "2.trace").write_bytes(b"other")
    (example / "3.trace").write_bytes(json.dumps({"version": VERSION}).encode().ljust(DROPPED.start) + bytes(8))
    whole = (example / "0.trace").read_bytes()
    assert run(capsys, example).startswith("2 ranks, 1 group, 5 calls in 0.21 s; 1 failed\n")
    assert [record.getMessage().rpartition("/")[2] for record in caplog.records] == ["2.trace", "3.trace"]

    caplog.clear()
    damaged = b"".join(each[:-4] + bytes(4) for each in (wait(20, 30), mark("step", 25), call("barrier", 20, 30)))
    (example / "0.trace").write_bytes(whole + damaged.ljust(PIECE_BYTES, b"\0"))
    assert run(capsys, example).startswith("2 ranks, 1 group, 5 calls in 0.21 s; 1 failed\n")
    assert "0.trace: left out 3 of 11 entries" in caplog.text


@pytest.mark.parametrize(
    ("length", "entries"),
    [
        (HEADER_BYTES - 1, 0),
        (HEADER_BYTES, 0),
        (HEADER_BYTES + 2 * ENTRY.itemsize, 2),
        (HEADER_BYTES + 4 * ENTRY.itemsize - 1, 3),
        (HEADER_BYTES + PIECE_BYTES - 1, 9),
    ],
)
def test_a_file_that_was_cut_short_is_named(example, length, entries, capsys, caplog):
    os.truncate(example / "1.trace", length)
    run(capsys, example)
    what = f"of rank 1 of group 77 anything after the first {entries} entries is missing"
    assert [each.getMessage() for each in caplog.records] == [f"{example / '1.trace'} was cut short: {what}"]


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


def test_what_only_waited_is_not_drawn_as_moving(tmp_path, capsys):
    image = pytest.importorskip("matplotlib.image")
    write(tmp_path, 0, call("barrier", 0, 100, waited=100), call("barrier", 500, 501, waited=1), mark("end", 1000))
    write(tmp_path, 1, mark("end", 1000))
    run(capsys, tmp_path, "--plot", tmp_path / "picture.png")
    red, _, blue, *_ = np.moveaxis(image.imread(tmp_path / "picture.png"), -1, 0)
    below_the_legend = slice(len(red) // 4, None)
    assert (red - blue)[below_the_legend].max() > 0.5
    assert (blue - red)[below_the_legend].max() < 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "missing/x.json"], "expected a file that can be written, got 'missing/x.json': No such file"),
        (["--from", "nan"], "argument --from: expected a number from 0 on, got 'nan'"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(example, options, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(example), *options])
    assert words in capsys.readouterr().err


def test_a_part_of_the_time_that_is_empty_is_refused(example, capsys):
    assert main(["trace", str(example), "--from", "5", "--until", "1"]) == 2
    assert capsys.readouterr().err == "ringcomm trace: expected --from below --until, got 5 and 1\n"


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
