"""What the variables of SLURM say about a step: its hosts, and a port of its own."""

import re

from ringcomm.errors import ArgumentError, refuse

__all__ = ["expand_hosts", "step_port"]

PORTS = range(20_000, 30_000)  # below those that Linux takes for outgoing connections
STRIDE = 101  # apart from the next job, so that it seldom meets the steps of this one

# A part of a list: a name with ranges in brackets, such as rack[0-1]node[01-16,20]. Commas in brackets end no part.
PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
MAX_HOSTS = 1 << 16


def expand_hosts(hosts: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7],gpu1`, in its order, as `scontrol show hostnames` does."""
    names: list[str] = []
    parts = PART.findall(hosts)
    if ",".join(parts) != hosts or not hosts:
        raise _malformed(hosts)
    for part in parts:
        names += _expand(part, hosts, MAX_HOSTS - len(names))
    return names


def step_port(job: str, step: str, ports: range = PORTS) -> int:
    """Return the port of a step: the same on all its hosts, and seldom that of another step that runs there."""
    try:
        number = int(job) + STRIDE * int(step)
    except ValueError:
        raise refuse("the environment of srun", "integers", f"SLURM_JOB_ID={job}, SLURM_STEP_ID={step}") from None
    return ports[number % len(ports)]


def _expand(part: str, hosts: str, most: int) -> list[str]:
    """Return the names of a part of the list `hosts`, at most so many."""
    names = [""]
    for index, text in enumerate(BRACKETS.split(part)):
        endings = [text]
        if index % 2:  # what was in brackets
            endings = [number for each in text.split(",") for number in _numbers(each, hosts, most)]
        if len(names) * len(endings) > most:
            raise _too_many(hosts)
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(text: str, hosts: str, most: int) -> list[str]:
    """Return the numbers of `7` or `01-03`, with the zeros of the first."""
    if not (found := RANGE.fullmatch(text)):
        raise _malformed(hosts)
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first):
        raise _malformed(hosts)
    if int(last) - int(first) >= most:
        raise _too_many(hosts)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _too_many(hosts: str) -> ArgumentError:
    return refuse("SLURM_STEP_NODELIST", f"at most {MAX_HOSTS} hosts", repr(hosts))


def _malformed(hosts: str) -> ArgumentError:
    return refuse("SLURM_STEP_NODELIST", "a list of hosts such as 'node[01-03,7],gpu1'", repr(hosts))
