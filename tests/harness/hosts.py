"""Hosts on one machine: two joined by a link, and mpirun across them; or more, of which the first is the switch.

A host is a set of namespaces: network, host name, processes, shared memory, mounts. The others start inside host A, so
that an mpirun on A can enter them instead of using ssh. Nothing of it has a name outside. When A's first process ends,
also because the tests are killed, the kernel ends all processes of all hosts, and removes the links.
"""

import functools
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from harness import mpi_world, pools

NAMES = ("host-a", "host-b", "host-c", "host-d")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")  # private to the namespaces
AGENT = "/dev/shm/agent"  # each host has its own /dev/shm

# Prints the id of a process through which to enter the host, then a line when the host is ready. Its first process
# reads our pipe, which closes when we end, and ignores SIGCHLD, since it inherits orphans. UCX looks for interfaces in
# /sys.
HOST = """
echo $$
exec unshare --net --uts --ipc --pid --fork --mount --mount-proc sh -ec '
    mount -t tmpfs tmpfs /dev/shm
    mount -t sysfs sysfs /sys
    hostname "$0"
    ip link set lo up
    echo
    exec env --ignore-signal=CHLD cat
' "$0"
"""
# If both ends had the same index, the kernel would take a second to bring the link up.
LINK = "ip link add eth0 index 1001 type veth peer name eth0 index 1002 netns $0"
SWITCH = "ip link add eth0 type bridge"
PORT = """
ip link add port$0 index 100$0 type veth peer name eth0 index 2000 netns $1
ip link set port$0 master eth0 up
"""
LINK_END = """
ip address add "$0/24" dev eth0
ip link set eth0 up
"""
# Drops TCP that arrives by the link, but for connections to or from these ports, as a firewall does.
FIREWALL = """
for family in -4 -6; do
    ip $family rule add pref 1 dev eth0 ipproto tcp dport $0 lookup local
    ip $family rule add pref 2 dev eth0 ipproto tcp sport $0 lookup local
    ip $family rule add pref 3 dev eth0 ipproto tcp blackhole
    ip $family rule add pref 4 lookup local
    ip $family rule del pref 0
done
"""
# UCX does not use a link that is not up.
LINK_IS_UP = "until [ $(cat /sys/class/net/eth0/operstate) = up ]; do sleep 0.01; done"
# In place of ssh: the command for the remote shell follows the address.
ENTER = """#!/bin/sh
until [ "$1" = {address} ]; do shift; done
shift
exec {enter} sh -c "$*"
"""


class Host:
    """One of the two; `enter` is the command prefix that runs a program on it."""

    def __init__(self, name, inside=()):
        self.process = subprocess.Popen(
            [*inside, "sh", "-ec", HOST, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.stdout.readline().strip()
        if not self.process.stdout.readline():
            raise OSError(self.process.communicate()[1].strip())
        spaces = ["--net", "--uts", "--ipc", "--mount", f"--pid=/proc/{self.pid}/ns/pid_for_children"]
        self.entry = ["nsenter", f"--target={self.pid}", *spaces]
        self.enter = [*inside, *self.entry]

    def run(self, script, *args, text=None):
        command = [*self.enter, "sh", "-ec", script, *map(str, args)]
        ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=pools.OPERATION)
        if ended.returncode:
            raise OSError(ended.stderr.strip())
        return ended.stdout

    def admit_only(self, ports):
        """Have a firewall drop TCP from the other hosts, but for connections to or from the ports of a range."""
        self.run(FIREWALL, ports)

    def bytes_sent(self):
        return int(self.run("cat /sys/class/net/eth0/statistics/tx_bytes"))


class Hosts:
    def __init__(self, hosts, jobs):
        self.hosts, self.jobs = hosts, jobs
        self.a, self.b, *_ = hosts

    def __iter__(self):
        return iter(self.hosts)

    def cut_link(self):
        self.a.run("ip link set eth0 down")

    def start(self, library, per_host, program, *args, env=None, stdout=subprocess.PIPE, stderr=None):
        """Start ranks on each host, with this Python; return the mpirun process."""
        mpirun, settings = mpi_world.LIBRARIES[library]()
        text = ENTER.format(address=ADDRESSES[1], enter=" ".join(self.b.entry))
        for host in self:  # Open MPI needs it on both
            host.run('cat > "$0"; chmod +x "$0"', AGENT, text=text)
        remote = REMOTE[library](",".join(f"{address}:{per_host}" for address in ADDRESSES[:2]))
        job = subprocess.Popen(
            [*self.a.enter, *mpirun, *remote, sys.executable, str(program), *map(str, args)],
            env={**os.environ, "TMPDIR": "/dev/shm", **settings, **(env or {})},  # where mpirun leaves its files
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        return self.jobs.enter_context(job)

    def pool(self, library, per_host):
        """Start a pool of ranks on each host; it can be reached while the link is down."""

        def start(output, *command):
            return self.start(library, per_host, *command, stdout=output, stderr=output)

        pool = mpi_world.pool(2 * per_host, start)
        self.jobs.callback(pool.kill)
        return pool


@contextmanager
def several_hosts(count):
    """Make hosts, joined by a link or a switch."""
    with ExitStack() as processes:
        hosts = []
        for name in NAMES[:count]:
            hosts.append(Host(name, hosts[0].enter if hosts else ()))
            processes.enter_context(hosts[-1].process)
        a, *others = hosts
        if count == 2:
            a.run(LINK, others[0].pid)
        else:
            a.run(SWITCH)
            for port, host in enumerate(others):
                a.run(PORT, port, host.pid)
        for host, address in zip(hosts, ADDRESSES, strict=False):
            host.run(LINK_END, address)
        for host in hosts:
            host.run(LINK_IS_UP)
        try:
            yield Hosts(hosts, processes)
        finally:
            a.process.stdin.close()


two_hosts = functools.partial(several_hosts, 2)


def why_not(library):
    """Return the reason why this library cannot run on two hosts here; None if it can."""
    return mpi_world.why_not(library) or why_no_hosts()


@functools.cache
def why_no_hosts():
    missing = [program for program in ("unshare", "nsenter", "ip") if not shutil.which(program)]
    if missing:
        return f"not found: {', '.join(missing)}"
    try:
        with two_hosts():
            return None
    except OSError as failure:
        return f"no namespaces: {failure}"


# The options of a library for the hosts and the agent. There is only one interface to choose.
REMOTE = {
    "openmpi": lambda hosts: ["--prtemca", "plm_ssh_agent", AGENT, "--host", hosts],
    "mpich": lambda hosts: ["-launcher-exec", AGENT, "-hosts", hosts],
}
