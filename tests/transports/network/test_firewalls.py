"""Jobs on two hosts whose firewalls drop TCP to all ports but the few of RINGCOMM_PORT_RANGE."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing

import pytest
from test_restarts import PROGRAM

from harness import pools
from harness.hosts import ADDRESSES, two_hosts, why_no_hosts
from harness.nodes import Job, finish

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))]

MASTER_PORT = 29500
PORTS = "29500-29502"  # the launcher of node 0, and one for each of two ranks
V4, V6 = ADDRESSES[0], "fd00::1"


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as hosts:
        for number, host in enumerate(hosts, 1):
            host.run("ip address add fd00::$0/64 dev eth0 nodad", number)
            host.admit_only(PORTS)
        yield hosts


@pytest.fixture
def job(tmp_path):
    with closing(Job(tmp_path, 2)) as job:
        yield job


def run(hosts, job, program, *arguments, addresses=(V4, V4), ports=PORTS, options=(), each=({}, {}), **env):
    """Return the status, output and errors of each node; `each`: variables for the ranks of each."""
    path = job.folder / "program.py"
    path.write_text(program)
    started = []
    for node, (host, address, own) in enumerate(zip(hosts, addresses, each, strict=True)):
        settings = {"RINGCOMM_PORT_RANGE": ports, **env, **own}
        enter = [*host.enter, "env", *(f"{name}={value}" for name, value in settings.items())]
        place = {"enter": enter, "address": (address, MASTER_PORT)}
        started.append(job.start(node, 2, str(path), *options, arguments=arguments, **place))
    return [finish(launcher) for launcher in started]


# Which ports this host listens at, or any other in its network.
LISTENING = """
def listening():
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
"""
CALLS = f"""
import numpy as np
import ringcomm
{LISTENING}
with ringcomm.init(timeout=20) as comm:
    x = comm.all_reduce(np.full(1 << 20, comm.rank + 1.0))
    assert (x == 10).all()
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sent = [comm.send(np.full(3, comm.rank), other, async_op=True) for other in others]  # most are not connected yet
    for other in others:
        found = np.empty(3, int)
        comm.recv(found, other)
        assert (found == other).all()
    for each in sent:
        each.wait()
    comm.barrier()
    assert listening() <= {{29500, 29501, 29502}}, listening()
    comm.barrier()
    print("done")
"""


@pytest.mark.parametrize("address", [V4, V6])
@pytest.mark.parametrize("flows", [1, 2])
def test_each_rank_needs_one_port(hosts, job, address, flows):
    for status, out, err in run(hosts, job, CALLS, addresses=[address] * 2, RINGCOMM_FLOWS=flows):
        assert (status, len(out)) == (0, 2), err


def test_ucx_takes_one_port_for_each_rank(tmp_path):
    """On hosts of their own: afterwards its ports stay in use for a minute."""
    with two_hosts() as hosts, closing(Job(tmp_path, 2)) as job:
        for status, out, err in run(hosts, job, CALLS, RINGCOMM_LINK="ucx"):
            assert (status, len(out)) == (0, 2), err


# The old communicator is open, and so is the one that the survivors connect anew.
SHRINK = """
import os, signal
import numpy as np
import ringcomm

with ringcomm.init(timeout=20) as comm:
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.barrier()
    except ringcomm.PeerLost:
        survivors = comm.shrink(timeout=10)
    x = survivors.all_reduce(np.ones(1 << 20))
    assert (x == 3).all()
    with survivors:
        print(survivors.rank, survivors.size)
"""


def test_survivors_connect_anew_at_the_same_ports(hosts, job):
    (first, out, err), (second, out_of_b, err_of_b) = run(hosts, job, SHRINK, options=["--respawn=0"])
    assert (first, second) == (0, 0), err + err_of_b
    assert out + out_of_b == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]


def test_a_lost_rank_comes_back_at_the_port_of_the_lost_one(hosts, job):
    ended = run(hosts, job, PROGRAM, json.dumps([[2, 0, 10], [1, 0, 20]]), "20", options=["--respawn=1"])
    assert [status for status, _, _ in ended] == [0, 0], ended
    found = [json.loads(line.partition(" ")[2]) for _, out, _ in ended for line in out]
    assert [[rank, restarts, size] for rank, restarts, _, size, *_ in found] == [
        [0, 0, 4],
        [1, 1, 4],
        [2, 1, 4],
        [3, 0, 4],
    ]


TORCH = f"""
import torch
import torch.distributed as dist
import ringcomm.torch
{LISTENING}
dist.init_process_group("ringcomm")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 3], [1, 2, 3], [0, 1, 2, 3])]
for group in [None, *groups]:
    if dist.get_rank(group) >= 0:
        x = torch.ones(1 << 20)
        dist.all_reduce(x, group=group)
        assert (x == dist.get_world_size(group)).all()
dist.barrier()
assert listening() <= {{29500, 29501, 29502}}, listening()
dist.barrier()
dist.destroy_process_group()
print("done", rank)
"""


@pytest.mark.parametrize("address", [V4, V6])
def test_all_groups_of_torch_share_the_port_of_their_rank(hosts, tmp_path, address):
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(TORCH)
    place = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={address}", f"--master-port={MASTER_PORT}"]
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    started = [
        subprocess.Popen(
            [*host.enter, *command, f"--node-rank={node}", str(program)],
            env={**os.environ, "RINGCOMM_PORT_RANGE": PORTS, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, host in enumerate(hosts)
    ]
    ended = [launcher.communicate(timeout=pools.JOB) for launcher in started]
    assert [launcher.returncode for launcher in started] == [0, 0], ended
    assert sorted("".join(out for out, _ in ended).split()[1::2]) == [*"0123"], ended


def test_hosts_may_have_link_local_addresses_only(tmp_path):
    """Their interfaces may have other names."""
    with two_hosts() as hosts, closing(Job(tmp_path, 2)) as job:
        hosts.b.run("ip link set eth0 down; ip link set eth0 name eth7; ip link set eth7 up")
        for number, (host, interface) in enumerate(zip(hosts, ("eth0", "eth7"), strict=True), 1):
            host.run("ip address flush dev $0; ip address add fe80::$1/64 dev $0 nodad", interface, number)
        addresses = "[fe80::1%eth0]", "fe80::1%eth7"
        for status, out, err in run(hosts, job, CALLS, addresses=addresses, RINGCOMM_FLOWS=2):
            assert (status, len(out)) == (0, 2), err


def test_a_host_may_be_reached_at_an_address_of_no_interface(tmp_path):
    """As in a container whose ports are mapped: the kernel of each host takes what arrives for the mapped address."""
    mapped = "192.0.2.1", "192.0.2.2"
    with two_hosts() as hosts, closing(Job(tmp_path, 2)) as job:
        for host, own, other, via in zip(hosts, mapped, mapped[::-1], ADDRESSES[1::-1], strict=True):
            host.run("ip route add local $0 dev eth0; ip route add $1 via $2", own, other, via)
        settings = [{"RINGCOMM_HOST_ADDRESS": own, "RINGCOMM_BIND_ADDRESS": "0.0.0.0"} for own in mapped]
        program = CALLS.replace(
            "    comm.barrier()\n", "    comm.barrier()\n    print(open('/proc/net/tcp').read())\n", 1
        )
        for status, out, err in run(hosts, job, program, addresses=mapped[:1] * 2, each=settings):
            assert status == 0, err
            at = [line.split()[2] for line in out if " 0A 0" in line]
            assert {each.partition(":")[0] for each in at} == {"00000000"}, out


NOWHERE = "192.0.2.9"


@pytest.mark.parametrize(
    ("setting", "each"),
    [
        ("RINGCOMM_HOST_ADDRESS", [{"RINGCOMM_HOST_ADDRESS": NOWHERE}] * 2),
        ("RINGCOMM_BIND_ADDRESS", [{}, {"RINGCOMM_BIND_ADDRESS": NOWHERE}]),
    ],
)
def test_an_address_of_no_interface_is_named(hosts, job, setting, each):
    ended = run(hosts, job, CALLS, each=each)
    assert [status for status, _, _ in ended] == [1, 1]
    text = f"({setting}): cannot listen at {NOWHERE}:29500: Cannot assign requested address"
    assert text in "".join(err for _, _, err in ended)


def test_an_address_of_no_interface_is_named_by_the_launcher(hosts, job):
    nowhere = [{"RINGCOMM_BIND_ADDRESS": NOWHERE}, {}]
    (status, _, err), _ = run(hosts, job, CALLS, each=nowhere, options=["--start-timeout=1"])
    assert status == 2
    assert f"RINGCOMM_BIND_ADDRESS: cannot listen at {NOWHERE}:29500: Cannot assign requested address" in err


def test_a_port_of_the_launcher_that_is_in_use_is_named(hosts, job):
    hold = "import socket, sys; s = socket.create_server(('10.0.0.1', 29500)); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*hosts.a.enter, sys.executable, "-c", hold], **pipes) as holder:
        holder.stdout.readline()
        (first, _, err), _ = run(hosts, job, CALLS, options=["--start-timeout=1"])
    assert first == 2
    assert "--master-addr: cannot listen at 10.0.0.1:29500: Address already in use" in err


def test_a_range_that_is_full_is_named_and_how_many_ports_are_needed(hosts, job):
    for status, _, err in run(hosts, job, CALLS, ports="29500-29501"):
        assert status != 0
        expected = (
            r"no port of RINGCOMM_PORT_RANGE=29500-29501 is free at 10\.0\.0\.1: the 2 ranks of this host need one "
        )
        assert re.search(expected + r"each; in use: 29500 by process \d+ \(.+\), 29501 by process \d+ \(.+\)", err), err


def test_a_firewall_that_drops_connections_is_suspected(hosts, job):
    for status, _, err in run(hosts, job, CALLS, ports="29510-29511", RINGCOMM_START_TIMEOUT=2):
        assert status != 0
        assert "check that no firewall on the way drops connections to it" in err
