"""`ringcomm simulate`: the table of predicted times."""

import re
from pathlib import Path

import pytest

from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.select import select
from ringcomm.commands import simulate
from ringcomm.commands.cli import main
from ringcomm.machine import tuning


def table(capsys, *arguments):
    """Return the head of the table, and {size: ({algorithm: (time, busbw)}, the fastest)}."""
    assert main(["simulate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    names = head[-2].split()[1:-1]
    rows = {}
    for line in lines[len(head) :]:
        size, *figures, fastest = line.split()
        values = [*map(float, figures)]
        rows[int(size)] = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True)), fastest
    return head, rows


def test_each_size_has_the_time_and_bus_bandwidth_of_each_algorithm_and_the_fastest(capsys):
    head, rows = table(capsys, "all_reduce", "-n", "4", "--nodes", "4", "-e", "64M", "-f", "16")
    assert head[0].startswith("all_reduce, 16 ranks, 4 per node; ")
    assert [*rows] == [4 * 16**i for i in range(7)]
    for size, (row, fastest) in rows.items():
        assert row.keys() == {*ALGORITHMS["all_reduce"], "hierarchy"}
        assert fastest == min(row, key=lambda name: row[name][0])
        for time, busbw in row.values():
            assert busbw == pytest.approx(size / (time * 1e-6) * 2 * 15 / 16 / 1e9, abs=1e-3)


def test_a_ring_over_nodes_takes_the_time_of_the_formula(capsys):
    _, rows = table(
        capsys, "all_gather", "--nodes", "8", "-b", "1M", "-e", "1M", "--latency", "7", "3", "--bandwidth", "2", "9"
    )
    assert rows[1 << 20][0]["ring"][0] == pytest.approx(7 * (7 + (1 << 20) / 8 / 2e3), abs=0.01)


def test_the_constants_are_printed_and_used(capsys):
    options = ["--latency", "7", "3", "--bandwidth", "2", "8", "--reduce-bandwidth", "0.5"]
    head, rows = table(capsys, "reduce_scatter", "-n", "2", "-b", "64K", "-e", "64K", *options)
    assert "between nodes 7 µs (given) and 2 GB/s (given)" in head[1]
    assert "3 µs and 8 GB/s" in head[1]
    assert "at 0.5 GB/s" in head[1]
    assert rows[65536][0]["ring"][0] == pytest.approx(3 + 32768 / 8e3 + 32768 / 0.5e3, abs=0.01)


def test_without_constants_those_of_a_job_on_such_machines_are_used(capsys, tmp_path, monkeypatch):
    arguments = ("all_gather", "--nodes", "8", "-b", "1M", "-e", "1M")
    assert "between nodes 20 µs (default) and 10 GB/s (default)" in table(capsys, *arguments)[0][1]
    file, kind = tmp_path / "tuning.json", tuning.machine_name()
    tuning.write(file, {"link_latency": 7, "link_bandwidth": 2}, {}, tuning.link_name((kind, kind), "mpi"))
    monkeypatch.setenv("RINGCOMM_TUNING", str(file))
    head, rows = table(capsys, *arguments)
    assert "between nodes 7 µs (measured over mpi) and 2 GB/s (measured over mpi)" in head[1]
    assert rows[1 << 20][0]["ring"][0] == pytest.approx(7 * (7 + (1 << 20) / 8 / 2e3), abs=0.01)
    monkeypatch.setenv("RINGCOMM_LINK_LATENCY", "5")
    head, _ = table(capsys, *arguments, "--bandwidth", "3", "10")
    assert "between nodes 5 µs (set) and 3 GB/s (given)" in head[1]


def test_only_schedules_of_few_ranks_are_recorded(capsys, monkeypatch):
    monkeypatch.setattr(simulate, "MAX_RECORDED_RANKS", 4)
    assert table(capsys, "all_reduce", "-n", "2", "--nodes", "2")[0][0].endswith("recorded schedules")
    monkeypatch.setattr(simulate, "record", None)
    assert table(capsys, "all_reduce", "-n", "2", "--nodes", "4")[0][0].endswith(
        "closed forms (recorded up to 4 ranks)"
    )


def test_a_barrier_has_no_bandwidth(capsys):
    _, rows = table(capsys, "barrier", "--nodes", "16")
    assert rows == {0: ({"dissemination": (80.0, 0.0)}, "dissemination")}


def test_the_hierarchy_is_shown_for_several_nodes_of_several_ranks(capsys):
    for ranks, nodes, found in ((2, 2, True), (1, 4, False), (4, 1, False)):
        head, rows = table(capsys, "all_reduce", "-n", str(ranks), "--nodes", str(nodes), "-e", "4")
        assert ("hierarchy" in rows[4][0]) is found
        assert any(line.startswith("hierarchy:") for line in head) is found


def test_a_call_takes_the_fastest_algorithm(capsys):
    _, rows = table(capsys, "all_reduce", "--nodes", "11", "-b", "64", "-e", "256M")
    for size, (_, fastest) in rows.items():
        assert fastest == select("all_reduce", 11, size // 4, 4).name


def test_a_hundred_thousand_ranks_are_simulated(capsys):
    for collective in ALGORITHMS:
        head, rows = table(capsys, collective, "-n", "8", "--nodes", "12500", "-e", "4")
        assert "100000 ranks" in head[0]
        assert rows


def test_the_docs_show_what_the_command_prints(capsys):
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    command, output = re.search(r"```\n\$ ringcomm (.*?)\n(.*?)```", text, re.DOTALL).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output
    assert f"**Up to {simulate.MAX_RECORDED_RANKS} ranks**" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dance"], "argument COLLECTIVE: invalid choice: 'dance'"),
        (["all_reduce", "-n", "0"], "argument -n/--ranks: expected an integer from 1 on, got '0'"),
        (["all_reduce", "--latency", "-1", "2"], "argument --latency: expected a positive number, got '-1'"),
        (["all_reduce"], "one rank does not communicate: expected -n or --nodes"),
        (["all_reduce", "-n", "2", "-b", "8", "-e", "4"], "sizes: expected -b <= -e, got 8 > 4 bytes"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words, capsys):
    try:
        status = main(["simulate", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in re.sub(r"\s+", " ", capsys.readouterr().err)
