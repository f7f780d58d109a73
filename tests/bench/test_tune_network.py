"""`ringcomm tune --network`: the pairs of hosts that are measured, and what is kept for later jobs."""

import json
from itertools import cycle

import pytest

import harness
import ringcomm
from harness.jobs import run_job
from harness.nodes import Job, finish
from ringcomm.bench.tuning import network as tune_network
from ringcomm.bench.tuning.network import fastest_flows, measure, pairs_by_kinds
from ringcomm.commands.cli import main
from ringcomm.machine import tuning


@pytest.mark.parametrize(
    ("hosts", "machines", "expected"),
    [
        ("01", "aa", {"aa": [[(0, 1)]]}),
        ("0123", "aaaa", {"aa": [[(0, 1)], [(2, 3)]]}),
        ("012", "aaa", {"aa": [[(0, 1)]]}),
        ("0011", "aaaa", {"aa": [[(0, 2), (1, 3)]]}),
        ("001", "aaa", {"aa": [[(0, 2)]]}),
        ("012", "aba", {"aa": [[(0, 2)]], "ab": [[(0, 1)]]}),
        ("0123", "abba", {"aa": [[(0, 3)]], "ab": [[(0, 1)], [(3, 2)]], "bb": [[(1, 2)]]}),
        ("000", "aaa", {}),
    ],
)
def test_every_two_kinds_of_machines_are_measured_by_all_pairs_of_hosts_at_once(hosts, machines, expected):
    found = pairs_by_kinds([(host, None) for host in hosts], [*machines])
    assert {"".join(kinds): pairs for kinds, pairs in found.items()} == expected


class FakeLink:
    """Both ranks of a pair, the link of 10 µs and 2 GB/s between them, and the clock; `noise` delays one call each."""

    rank = 0

    def __init__(self, monkeypatch, *noise):
        self.now, self.noise = 0.0, cycle(noise)
        monkeypatch.setattr(tune_network, "perf_counter", lambda: self.now)

    def all_gather(self, own, blocks):
        assert blocks.nbytes == 2 * own.nbytes
        self.now += 10e-6 + next(self.noise) + (own.nbytes / 2e9 + 10e-6 if own.nbytes > 1 else 0)

    def all_gather_object(self, value):
        return [value]

    def barrier(self):
        pass

    def split(self, color):
        assert color == 0
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def measured(monkeypatch, *noise):
    cost = measure(FakeLink(monkeypatch, *noise), [[(0, 1)]], 20)
    return cost and (cost[0] * 1e6, 1e-9 / cost[1])


def test_what_disturbs_most_rounds_does_not_count(monkeypatch):
    noise = 800 * [0.0] + 1000 * [1e-3]
    assert measured(monkeypatch, *noise) == pytest.approx((10, 2))


def test_where_a_latency_hides_the_bandwidth_a_longer_stream_tells_it(monkeypatch):
    latency, bandwidth = measured(monkeypatch, 1e-3)
    assert latency == pytest.approx(1010)
    assert bandwidth == pytest.approx(2.6, rel=0.1), "it is 2 without the noise, and 1 MiB would tell -2.2"


def test_machines_too_busy_to_tell_the_bandwidth_are_not_measured(monkeypatch):
    assert measured(monkeypatch, 0.1) is None


@pytest.mark.parametrize(
    ("byte_times", "expected"),
    [((4, 2, 1, 0.95), (4, 1)), ((1, 0.95), (1, 1)), ((8, 4, 2, 1), (8, 1)), ((1, None), (1, 1))],
)
def test_flows_are_kept_while_they_are_faster(byte_times, expected):
    first, *others = byte_times
    costs, following, used = {"kinds": (5, first)}, iter(others), []

    def measured(_):
        byte_time = next(following)
        return byte_time and (7, byte_time)

    flows = fastest_flows(lambda count: used.append(count) or True, measured, costs)
    assert (flows["kinds"], *costs["kinds"]) == (expected[0], 5, expected[1])
    assert used == [2, 4, 8][: len(others)]


def test_all_kinds_of_machines_are_measured_by_one_number_of_flows():
    costs, used = {"slow": (0, 8), "fast": (0, 1)}, [1]
    found = fastest_flows(
        lambda count: used.append(count) or True,
        lambda kinds: (0, {"slow": 8 / min(used[-1], 4), "fast": 1}[kinds]),
        costs,
    )
    assert found == {"slow": 4, "fast": 1}
    assert costs == {"slow": (0, 2), "fast": (0, 1)}


def test_a_link_without_flows_is_measured_once():
    assert fastest_flows(lambda _: False, lambda _: pytest.fail("measured again"), {"kinds": (0, 1)}) == {"kinds": 1}


def tune_two(comm, path):
    try:
        return tune_network.tune_network(comm, path, 1)
    except ringcomm.RingcommError as error:
        return str(error)


def test_what_cannot_be_measured_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "tuning.json"
    tuning.write(file, {"one_shot_bytes": 4}, {})
    before = file.read_bytes()
    monkeypatch.setattr(tune_network, "hosts_of", lambda _: [("a", None), ("b", None)])
    monkeypatch.setattr(tune_network, "measure", lambda *_: None)
    message, status = harness.run(tune_two, 2, file, world="threads")
    assert message.startswith("the machines are too busy to measure their network: 64 MiB take hardly longer than one")
    assert message.endswith(f"; {file} is unchanged")
    assert status == 2, "only rank 0 speaks"
    assert file.read_bytes() == before


@pytest.mark.slow
def test_later_jobs_between_such_hosts_use_what_was_measured(tmp_path, monkeypatch):
    file = tmp_path / "tuning.json"
    tuning.write(file, {"one_shot_bytes": 4}, {})
    monkeypatch.setenv("RINGCOMM_TUNING", str(file))
    job = Job(tmp_path, 2)
    program = job.program("""
        import ringcomm
        from ringcomm.commands.cli import main
        os.environ["RINGCOMM_HOST_ID"] = f"host {rank // 2}"
        status = main(["tune", "--network", "-n", "3"])
        with ringcomm.init() as comm:
            latency, byte_time = comm._transport._network.selector.cluster.inter_node
            print("takes", f"{latency * 1e6:.3g}", f"{1e-9 / byte_time:.3g}")
        sys.exit(status)
        """)
    try:
        launchers = [job.start(node, 2, program) for node in range(2)]
        (status, out, err), (other_status, other_out, other_err) = [finish(launcher) for launcher in launchers]
    finally:
        job.close()
    assert (status, err, other_status, other_err) == (0, "", 0, "")
    name = tuning.link_name((tuning.machine_name(), tuning.machine_name()), "sockets")
    entry = json.loads(file.read_text())[name]
    assert (entry["ringcomm"], entry["pairs of hosts"]) == (ringcomm.__version__, 1)
    latency, bandwidth = (entry["settings"][each] for each in tuning.LINK)
    assert f"[0] {name}: {latency:g} µs, {bandwidth:g} GB/s" in out
    taken = f"takes {latency:.3g} {bandwidth:.3g}"
    assert [line for line in out if "takes" in line] == [f"[0] {taken}", f"[1] {taken}"]
    assert other_out == [f"[2] {taken}", f"[3] {taken}"], "only rank 0 prints"
    assert tuning.read(file) == {"one_shot_bytes": 4}


REFUSED = {
    "tune --network": "--network: expected ranks on several hosts",
    "tune --network --ranks 2": "--ranks: expected no --network",
    "tune": "a launcher has started this: expected --network",
}
# One job for all: to start one takes longer than all refusals.
REFUSALS = f"""
from ringcomm.commands.cli import main
print([main(options.split()) for options in {[*REFUSED]}])
"""


@pytest.mark.slow
def test_ranks_of_one_host_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOMM_TUNING", str(tmp_path / "tuning.json"))
    done = run_job(tmp_path, 2, REFUSALS)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [2, 2, 2]" for rank in range(2)]
    said = done.stderr.splitlines()
    assert len(said) == len(REFUSED), "only rank 0 speaks"
    for line, message in zip(said, REFUSED.values(), strict=True):
        assert line.startswith(f"[0] ringcomm tune: {message}")
    assert not (tmp_path / "tuning.json").exists()


def test_a_process_alone_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_TUNING", str(tmp_path / "tuning.json"))
    assert main(["tune", "--network"]) == 2
    assert "--network: expected ranks on several hosts: start it by ringcomm run --nnodes" in capsys.readouterr().err
