"""Measure an all_reduce between two hosts, which this machine plays, with TLS and without, in turns.

    python benchmarks/tls.py                                                                          an unlimited link
    python benchmarks/tls.py --rates 10gbit --sizes 1M,16M

Needs what network.py needs, and the command openssl, which makes the certificates. It prints a Markdown table, with the
seconds for which a rank of each uses its core.
"""

import argparse
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from hosts import hosts
from network import DIRECT, Case, Setup, line, micro, one_round, rates_of, start_jobs

from ringcomm.bench.interrupts import interruptible
from ringcomm.options import parse_bytes, positive, readable, several, whole

TLS = "ringcomm over TLS"
SELF_SIGNED = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ringcomm -days 2 "
    "-out rank.pem -keyout rank.key"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks-per-host", type=whole(1), default=1, help="default: 1")
    add("--rates", type=rates_of, default="0", help="see network.py")
    add("--sizes", type=several(parse_bytes), default="4,1K,64K,1M,16M", help="default: 4,1K,64K,1M,16M")
    add("--rounds", type=whole(1), default=7, help="default: 7")
    add("--seconds", type=positive, default="0.2", help="of a round (default: 0.2)")
    arguments = parser.parse_args()
    setup = Setup(2, arguments.ranks_per_host, tuple(arguments.rates), real_time=False)
    os.environ["RINGCOMM_JOB_SECRET"] = secrets.token_hex(32)
    with interruptible(), ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        subprocess.run(SELF_SIGNED.split(), cwd=folder, check=True, stderr=subprocess.DEVNULL)
        files = ",".join(str(folder / name) for name in ("rank.pem", "rank.key", "rank.pem"))  # its own authority
        on = stack.enter_context(hosts(2, setup.rates))
        jobs = start_jobs(setup, on, stack, {DIRECT: "ringcomm", TLS: "ringcomm"}, **{TLS: {"RINGCOMM_TLS": files}})
        print(f"{setup}, all_reduce, medians of {arguments.rounds} rounds:\n")
        print(
            line(["S", "µs: plain", "µs: TLS", "TLS / plain", "CPU µs: plain", "CPU µs: TLS"]) + "\n" + "|---" * 6 + "|"
        )
        for size in arguments.sizes:
            case = Case.of("all_reduce", size, setup)
            calls = {name: case.prepare(job, arguments.seconds) for name, job in jobs.items()}
            rounds = [
                {name: one_round(job, calls[name], on) for name, job in jobs.items()} for _ in range(arguments.rounds)
            ]
            wrong = {name for name, job in jobs.items() if sum(job.request("check"))}
            seconds, cpu = ([median(each[name][i] for each in rounds) for name in jobs] for i in range(2))
            cells = [readable(size), *map(micro, seconds), f"**{seconds[1] / seconds[0]:.2f}**", *map(micro, cpu)]
            print(line(cells), *(f"wrong elements: {name}" for name in wrong), flush=True)
        for job in jobs.values():
            job.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
