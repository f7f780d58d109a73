"""Flows: large data of two ranks over several connections, and over all addresses of their hosts."""

import logging
import re
import socket
import time

import numpy as np
import pytest

from cases.between_hosts import run_on
from harness.failures import until
from ringcomm import ArgumentError, Config
from ringcomm.transports.network.mesh import Mesh

LARGE = 1 << 20  # elements: several pieces on each flow
FEW = 1 << 10
TWO_ADDRESSES = "127.0.0.1,127.0.0.2"


@pytest.fixture
def made(monkeypatch):
    """Return the sockets of all flows that are made, by rank, with the rank at the other end and both addresses."""
    found = []
    take_flow = Mesh.take_flow

    def noted(mesh, rank, peer):
        take_flow(mesh, rank, peer)
        copy = socket.socket(fileno=socket.dup(mesh.flows[-1][1].fileno()))
        found.append((mesh.rank, rank, copy.getsockname()[0], copy.getpeername()[0], copy))

    monkeypatch.setattr(Mesh, "take_flow", noted)
    yield found
    for *_, copy in found:
        copy.close()


def sum_up(comm, length=LARGE):
    x = np.arange(length, dtype=np.int64) * (comm.rank + 1)
    comm.all_reduce(x)
    assert (x == np.arange(length) * (comm.size * (comm.size + 1) // 2)).all()


def pass_on(comm):
    """Send large data to the next rank, which is on another host."""
    sent = np.full(LARGE, comm.rank)
    work = comm.send(sent, (comm.rank + 1) % comm.size, async_op=True)
    found = np.empty_like(sent)
    comm.recv(found, (comm.rank - 1) % comm.size)
    work.wait()
    assert (found == (comm.rank - 1) % comm.size).all()


@pytest.mark.parametrize("use", [sum_up, pass_on])
def test_large_data_takes_as_many_flows_as_are_set(use, made):
    def rank(comm):
        sum_up(comm, FEW)
        assert made == []
        comm.barrier()
        use(comm)
        until(lambda: len(made) == 6, "three flows with two ends")
        use(comm)
        comm.barrier()
        assert len(made) == 6

    run_on("01", rank, flows=3)


def test_one_connection_carries_everything_unless_more_are_set(made):
    run_on("01", sum_up)
    assert made == []


def test_ranks_of_four_hosts_use_flows_at_all_addresses(made):
    def rank(comm):
        for use in (sum_up, pass_on, sum_up):
            use(comm)
        until(lambda: {of for of, *_ in made} == {*range(comm.size)}, "flows of every rank")

    run_on("0123", rank, host_address=TWO_ADDRESSES, flows=2)
    assert {(own, other) for _, _, own, other, _ in made} == {(each, each) for each in TWO_ADDRESSES.split(",")}


def test_a_flow_that_ends_is_replaced_by_the_others_and_said(made, caplog):
    def rank(comm):
        sum_up(comm)
        until(lambda: len(made) == 6, "three flows with two ends")
        comm.barrier()
        if comm.rank == 0:
            made[0][-1].shutdown(socket.SHUT_RDWR)
        for _ in range(10):  # over more time than passes between two looks at the flows
            sum_up(comm)
            time.sleep(0.05)
        until(lambda: len(caplog.records) == 2, "both ranks say so")

    with caplog.at_level(logging.WARNING, "ringcomm"):
        run_on("01", rank, flows=3)
    for rank, other in ((0, 1), (1, 0)):
        (said,) = [each for each in caplog.messages if each.startswith(f"rank {rank}: ")]
        expected = rf"rank {rank}: a flow to rank {other} has ended \(.+\); 2 are left for its large data"
        assert re.fullmatch(expected, said)


def test_a_flow_that_cannot_be_made_is_said_and_not_missed(caplog, monkeypatch):
    listen = Mesh.__init__

    def elsewhere(mesh, *args):
        listen(mesh, *args)
        mesh.own[1] = f"127.0.0.1:{unused_port()}"  # where nothing listens

    def said():
        return [each for each in caplog.messages if "no flow" in each]

    def rank(comm):
        sum_up(comm)
        until(said, "a line")
        sum_up(comm)

    monkeypatch.setattr(Mesh, "__init__", elsewhere)
    with caplog.at_level(logging.INFO, "ringcomm"):
        run_on("01", rank, host_address=TWO_ADDRESSES)
    assert "rank 1 has no flow 1 to rank 0 (Connection refused)" in said()[0]


def unused_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_an_address_that_this_host_has_not_is_named():
    with pytest.raises(ArgumentError, match=r"RINGCOMM_HOST_ADDRESS\): cannot listen at 203\.0\.113\.7:0"):
        run_on("01", sum_up, host_address="127.0.0.1,203.0.113.7")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("flows", 0),
        ("flows", 17),
        ("flows", "2"),
        ("host_address", "a,,b"),
        ("host_address", "a,a"),
        ("host_address", 1),
    ],
)
def test_settings_of_flows_are_checked(setting, value):
    with pytest.raises(ArgumentError, match=setting):
        Config(**{setting: value})
