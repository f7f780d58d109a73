"""`ringcomm simulate`: the table of predicted times."""

import re
from pathlib import Path

import pytest

from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.select import select
from ringcomm.bootstrap.start_cost import start_cost
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


def test_10_000_ranks_on_hosts_of_128_cores_are_priced_inside_between_and_at_their_start(capsys):
    for collective in ALGORITHMS:
        head, _ = table(capsys, collective, "--nodes", "79", "--topology", "2x8x8", "--latency", "20", "10")
        assert head[0].startswith(f"{collective}, 10112 ranks, 128 per node; ")
        inside, between, start = head[-6:-3]
        # 7 lines in a cache, 7 in a NUMA node, 1 between those, and 3 down.
        assert inside.startswith(
            f"a small all_reduce inside a node: {1.15 + 18 * 0.185:.2f} µs, with 18 cache lines of "
        )
        assert inside.endswith(" 185 ns one after another, through the tree (127 without)")
        assert between.startswith(f"a small call between nodes: {7 * 20 + 1.15 + 18 * 0.185 + 1.15 + 0.185:.2f} µs, ")
        assert between.endswith(" with 7 rounds of 20 µs")
        assert "2.730 s on the server of the store" in start
        assert start.endswith(" on each rank, with 78 connections to other nodes")


def test_a_line_is_there_for_what_a_job_has(capsys):
    said = {}
    for layout in (("-n", "4"), ("--nodes", "4"), ("-n", "4", "--nodes", "4")):
        head, _ = table(capsys, "barrier", *layout)
        said[layout] = [line.split(":")[0] for line in head if line.startswith("a ")]
    assert [*said.values()] == [
        ["a small all_reduce inside a node", "a start"],
        ["a small call between nodes", "a start"],
        ["a small all_reduce inside a node", "a small call between nodes", "a start"],
    ]


def test_a_small_call_costs_what_is_given(capsys):
    head, _ = table(capsys, "barrier", "-n", "8", "--small-call", "0.2", "0.05")
    assert (
        f"a small all_reduce inside a node: {0.2 + 7 * 0.05:.2f} µs, with 7 cache lines of 50 ns one after another"
        == head[2]
    )


def test_a_link_carries_what_its_connections_do(capsys):
    """An all_gather of 8 ranks by the ring: 7 messages of an eighth each."""
    options = ["--nodes", "8", "-b", "1M", "-e", "1M", "--latency", "7", "3", "--bandwidth", "3", "9"]
    for more, carried in (((), 3), (("--flow", "1.2"), 1.2), (("--flow", "1.2", "--connections", "2"), 2.4)):
        _, rows = table(capsys, "all_gather", *options, *more)
        assert rows[1 << 20][0]["ring"][0] == pytest.approx(7 * (7 + (1 << 20) / 8 / (carried * 1e3)), abs=0.01)
    head, rows = table(capsys, "all_gather", *options, "--flow", "1.2", "--connections", "3")
    assert rows[1 << 20][0]["ring"][0] == pytest.approx(7 * (7 + (1 << 20) / 8 / 3e3), abs=0.01)
    assert "shared by the ranks of a node, 3 connections of 1.2 GB/s for two ranks; inside" in head[1]


def test_the_ranks_of_a_node_follow_from_its_topology(capsys):
    assert table(capsys, "barrier", "--topology", "2x2x3")[0][0].startswith("barrier, 12 ranks, 12 per node; ")
    assert table(capsys, "barrier", "--topology", "2x2x3", "-n", "5")[0][0].startswith("barrier, 5 ranks, 5 per node; ")


def test_the_docs_show_what_the_command_prints(capsys):
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    command, output = re.search(r"```\n\$ ringcomm (.*?)\n(.*?)```", text, re.DOTALL).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == output
    assert f"**Up to {simulate.MAX_RECORDED_RANKS} ranks**" in text


def test_the_docs_compare_measurements_with_what_is_predicted(capsys):
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()

    def small_call(*arguments):
        return float(re.search(r"inside a node: ([\d.]+) µs", table(capsys, "barrier", *arguments)[0][2])[1])

    rows = re.findall(r"^\| (\d+) ranks \| ([\d.]+) \|", text, re.MULTILINE)
    assert {ranks: float(predicted) for ranks, predicted in rows} == {n: small_call("-n", n) for n in ("4", "8")}
    assert f"`-n 2 --small-call 0.21 0.358` | {small_call('-n', '2', '--small-call', '0.21', '0.358')} |" in text

    rows = re.findall(r"^\| (\d) x (\d)(?:, (\w+))? \| (\d+) MiB \| ([\d.]+) ms", text, re.MULTILINE)
    assert len(rows) == 7
    for nodes, local, algorithm, size, predicted in rows:
        layout = ["--nodes", nodes, "-n", local, "-b", f"{size}M", "-e", f"{size}M"]
        _, found = table(capsys, "all_reduce", *layout, "--bandwidth", "0.1195", "10", "--latency", "7.6", "10")
        times, fastest = found[int(size) << 20]
        assert float(predicted) == pytest.approx(times[algorithm or fastest][0] / 1e3, rel=0.005)

    rows = re.findall(r"^\| (\d+) x (\d+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) == 5
    for nodes, local, predicted in ((int(nodes), int(local), float(text)) for nodes, local, text in rows):
        server, _, rank = start_cost(nodes, local, (nodes - 1) * local, byte_time=0)
        assert predicted == pytest.approx(server + rank * nodes * local / 2, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dance"], "argument COLLECTIVE: invalid choice: 'dance'"),
        (["all_reduce", "-n", "0"], "argument -n/--ranks: expected an integer from 1 on, got '0'"),
        (["all_reduce", "--latency", "-1", "2"], "argument --latency: expected a positive number, got '-1'"),
        (["all_reduce"], "one rank does not communicate: expected -n or --nodes"),
        (["all_reduce", "-n", "2", "-b", "8", "-e", "4"], "sizes: expected -b <= -e, got 8 > 4 bytes"),
        (["all_reduce", "-n", "1025"], "ranks per node: expected at most 1024, got 1025"),
        (["all_reduce", "--topology", "8x16x16"], "ranks per node: expected at most 1024, got 2048"),
        (
            ["all_reduce", "-n", "9", "--topology", "2x2x2"],
            "--topology: expected room for 9 ranks, got 2x2x2, which has 8",
        ),
        (
            ["all_reduce", "--topology", "2x8"],
            "topology: expected NUMA nodes x caches x ranks, such as '2x4x8', or None, got",
        ),
        (
            ["all_reduce", "-n", "2", "--connections", "0"],
            "argument --connections: expected an integer from 1 on, got '0'",
        ),
        (
            ["all_reduce", "--nodes", "2", "--connections", "4"],
            "--connections: expected --flow beside it, the GB/s of one connection, got 4",
        ),
        (["all_reduce", "-n", "2", "--flow", "0"], "argument --flow: expected a positive number, got '0'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words, capsys):
    try:
        status = main(["simulate", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in re.sub(r"\s+", " ", capsys.readouterr().err)
