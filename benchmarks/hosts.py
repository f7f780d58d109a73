"""Hosts on one machine: network namespaces, joined by links (two hosts) or switches (more).

Nothing of them has a name outside. The first process of a host reads our pipe, so it ends with us, however we end; the
kernel then removes the namespace with its links. Making them needs root.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["Host", "hosts"]

# In these scripts $0 is the number of the link. With equal indices of both ends the kernel would take a second to bring
# it up.
LINK = "ip link add eth$0 index 10$0 type veth peer name eth$0 index 20$0 netns $1"
SWITCH = "ip link add switch$0 type bridge; ip link set switch$0 up"
PORT = """
ip link add port$0.$1 index 1$0$1 type veth peer name eth$0 index 20$0 netns $2
ip link set port$0.$1 master switch$0 up
"""
# A single TCP stream then reaches 95 % of the rate, the rest being headers. The queue is longer than the TCP window, so
# no packet is dropped.
RATE = "tc qdisc add dev $0 root tbf rate $1 burst 128kb latency 50ms"
START = "ip address add $1/24 dev eth$0; ip link set eth$0 up"
AWAIT = "until ip link show eth$0 | grep -q 'state UP'; do sleep 0.01; done"


class Host:
    """A network namespace, with an address on each link; `enter` is the prefix of a command that runs there."""

    def __init__(self, stack: ExitStack, addresses: Sequence[str] = ()) -> None:
        self.addresses = addresses
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
        return sum(int(line.split()[9]) for line in lines if line.split()[0].startswith("eth"))


@contextmanager
def hosts(count: int, rates: Sequence[str | None] = (None,)) -> Iterator[list[Host]]:
    """Make hosts with a link for each of the rates, such as "1gbit": what a host at most sends there, and receives."""
    with ExitStack() as stack:
        made = [Host(stack, [f"10.0.{link}.{1 + i}" for link in range(len(rates))]) for i in range(count)]
        switches = Host(stack) if count > 2 else None
        for link, rate in enumerate(rates):
            if switches is None:
                made[0].run(LINK, link, made[1].pid)
            else:
                switches.run(SWITCH, link)
                for i, host in enumerate(made):
                    switches.run(PORT, link, i, host.pid)
                    if rate:
                        switches.run(RATE, f"port{link}.{i}", rate)
            for host in made:
                if rate:
                    host.run(RATE, f"eth{link}", rate)
                host.run(START, link, host.addresses[link])
            for host in made:
                host.run(AWAIT, link)
        yield made
