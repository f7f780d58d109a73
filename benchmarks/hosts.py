"""Hosts on one machine: network namespaces, joined by a link (two hosts) or a switch (more).

Nothing of them has a name outside. The first process of a host reads our pipe, so it ends with us, however we end; the
kernel then removes the namespace with its links. Making them needs root.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["Host", "hosts"]

DEVICE = "eth0"  # of each host
# With equal indices of both ends the kernel would take a second to bring the link up.
LINK = f"ip link add {DEVICE} index 1001 type veth peer name {DEVICE} index 1002 netns $0"
SWITCH = "ip link add switch type bridge; ip link set switch up"
PORT = f"""
ip link add port$0 index 100$0 type veth peer name {DEVICE} index 2000 netns $1
ip link set port$0 master switch up
"""
# A single TCP stream then reaches 95 % of the rate, the rest being headers. The queue is longer than the TCP window, so
# no packet is dropped.
RATE = "tc qdisc add dev $0 root tbf rate $1 burst 128kb latency 50ms"
START = f"ip address add $0/24 dev {DEVICE}; ip link set {DEVICE} up"
AWAIT = f"until ip link show {DEVICE} | grep -q 'state UP'; do sleep 0.01; done"


class Host:
    """A network namespace; `enter` is the prefix of a command that runs there."""

    def __init__(self, stack: ExitStack, address: str = "") -> None:
        self.address = address
        first = ["unshare", "--net", "sh", "-ec", "ip link set lo up; echo; exec cat"]
        pipe = subprocess.PIPE
        # In its own session: Ctrl-C reaches the benchmark alone.
        process = subprocess.Popen(first, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        stack.enter_context(process)  # closes the pipe, and waits
        assert process.stdout
        assert process.stderr
        if not process.stdout.readline():
            raise OSError(process.stderr.read().strip())
        self.pid = process.pid
        self.enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, script: str, *words: object) -> None:
        command = [*self.enter, "sh", "-ec", script, *map(str, words)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if ended.returncode:
            raise OSError(ended.stderr.strip())

    def bytes_sent(self) -> int:
        """Return the bytes that have left this host, with the headers of the packets."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{DEVICE}:")


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Make hosts that send and receive at most `rate`, such as "1gbit"."""
    with ExitStack() as stack:
        made = [Host(stack, f"10.0.0.{1 + i}") for i in range(count)]
        if count == 2:
            made[0].run(LINK, made[1].pid)
        else:
            switch = Host(stack)
            switch.run(SWITCH)
            for i, host in enumerate(made):
                switch.run(PORT, i, host.pid)
                if rate:
                    switch.run(RATE, f"port{i}", rate)
        for host in made:
            if rate:
                host.run(RATE, DEVICE, rate)
            host.run(START, host.address)
        for host in made:
            host.run(AWAIT)
        yield made
