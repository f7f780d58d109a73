"""By which latency and bandwidth a job between hosts chooses its algorithms: set, measured, or the defaults."""

import numpy as np
import pytest

from cases.between_hosts import run_on
from ringcomm import ArgumentError, Config
from ringcomm.algorithms.link_parameters import link_facts, link_parameters
from ringcomm.machine import interfaces, tuning


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOMM_TUNING", str(tmp_path / "tuning.json"))
    return tmp_path / "tuning.json"


def measured(latency, bandwidth):
    return {"link_latency": latency, "link_bandwidth": bandwidth}


def here():
    return tuning.machine_name(), tuning.machine_name()


def facts(machine="a", links=(), bandwidth=None):
    return {"machine": machine, "links": dict(links), "bandwidth": bandwidth}


def parameters(ranks, link="sockets", **settings):
    return [*link_parameters(Config(**settings), ranks, link)]


LINKS = {
    tuning.link_name(("a", "a"), "sockets"): measured(10, 4),
    tuning.link_name(("b", "a"), "sockets"): measured(50, 5),
    tuning.link_name(("b", "b"), "mpi"): measured(1, 40),
}


def test_what_is_set_goes_before_what_was_measured_and_that_before_the_default():
    ranks = [facts(links=LINKS)] * 2
    assert parameters(ranks) == [(10, "measured over sockets"), (4, "measured over sockets")]
    assert parameters(ranks, link_latency=7) == [(7, "set"), (4, "measured over sockets")]
    assert parameters(ranks, "mpi", link_bandwidth=3) == [(20, "default"), (3, "set")]


def test_the_slowest_link_between_the_kinds_of_machines_counts():
    ranks = [facts(kind, LINKS) for kind in "aab"]
    assert [value for value, _ in parameters(ranks)] == [50, 4]
    assert [value for value, _ in parameters(ranks, "mpi")] == [1, 40]
    assert [value for value, _ in parameters(ranks[:2])] == [10, 4]


def test_the_file_of_rank_0_holds_for_all():
    ranks = [facts(), facts(links=LINKS)]
    assert [value for value, _ in parameters(ranks)] == [20, 10]


def test_the_slowest_interfaces_say_the_bandwidth_of_sockets_that_were_not_measured():
    ranks = [facts(bandwidth=each) for each in (1.25, None, 0.125)]
    assert parameters(ranks) == [(20, "default"), (0.125, "of the interfaces")]
    assert parameters(ranks, link_bandwidth=3)[1] == (3, "set")
    assert parameters([facts(links=LINKS, bandwidth=0.125)])[1] == (4, "measured over sockets")
    assert parameters(ranks, "ucx")[1] == parameters(ranks, "mpi")[1] == (10, "default")


def test_every_rank_tells_its_kind_of_machine_and_its_measured_links(file):
    tuning.write(file, {"one_shot_bytes": 4}, {})
    tuning.write(file, measured(9, 2.5), {"date": "today"}, tuning.link_name(here(), "sockets"))
    assert link_facts() == {
        "machine": tuning.machine_name(),
        "links": {tuning.link_name(here(), "sockets"): measured(9, 2.5)},
        "bandwidth": None,
    }
    assert Config().one_shot_bytes == 4, "a link leaves the thresholds of the machine as they are"


@pytest.mark.parametrize(("found", "of_all"), [((0.125, 1.25), 1.375), ((0.125, None), None)])
def test_every_rank_tells_the_bandwidth_of_all_its_addresses(monkeypatch, found, of_all):
    monkeypatch.setattr(interfaces, "interface_of", {"10.0.0.1": "eth0", "10.1.0.1": "eth1"}.get)
    monkeypatch.setattr(interfaces, "bandwidth", dict(zip(("eth0", "eth1"), found, strict=True)).get)
    assert link_facts(["10.0.0.1", "10.1.0.1"])["bandwidth"] == of_all


def path_of_64_kib(comm):
    comm.all_reduce(np.ones(1 << 14, np.float32))
    return comm._transport.path()[0]


def test_a_job_chooses_by_the_measured_link(file):
    tuning.write(file, measured(500, 10), {}, tuning.link_name(here(), "sockets"))
    assert {*run_on("0123", path_of_64_kib)} == {"recursive_doubling"}
    assert {*run_on("0123", path_of_64_kib, link_latency=1.0, link_bandwidth=0.1)} == {"ring"}
    tuning.write(file, measured(1, 0.1), {}, tuning.link_name(here(), "sockets"))
    assert {*run_on("0123", path_of_64_kib)} == {"ring"}


@pytest.mark.parametrize("value", ["10", 0, -1, None, float("inf")])
def test_a_measurement_that_is_no_positive_number_is_refused(file, value):
    tuning.write(file, measured(value, 1), {}, tuning.link_name(here(), "sockets"))
    with pytest.raises(
        ArgumentError, match=r"tuning\.json cannot be read \(link_latency of .*expected a positive number"
    ):
        link_facts()
