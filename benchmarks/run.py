"""Measure ringcomm beside Gloo, Open MPI and MPICH on this machine, and keep one JSON file and one picture in results/.

    python benchmarks/run.py --setup-peers    about 35 minutes on an idle machine

Every measurement is a run of `ringcomm bench`, repeated three times. Its files go to build/benchmarks/; an interrupted
run continues there. The kept results have the run with the median time of each row, and the worst round of all runs.
tables.py makes docs/performance.md and the figures of README.md from them.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median_low
from typing import Any

from ringcomm.bench.report import write_json
from ringcomm.machine import tuning
from ringcomm.options import one_of, several

HERE = Path(__file__).parent
SMALL, LARGE = "-b 4 -e 1K -f 256", "-b 16K -e 64M"
OTHERS = "reduce_scatter all_gather broadcast reduce gather scatter all_to_all send_recv"
ALL, MPIS = "--vs gloo,openmpi,mpich", "--vs openmpi,mpich"  # Gloo is never the fastest, and takes long
# Waiting ranks of MPICH keep their cores, and a call soon takes minutes: the timeout ends MPICH there.
MORE_RANKS = "--ranks 4 -n 10 --timeout 15"
# Name → arguments of `ringcomm bench`.
MEASUREMENTS = {
    "all_reduce-2-small": f"all_reduce {SMALL} {ALL}",
    "all_reduce-2": f"all_reduce {LARGE} {ALL}",
    "all_reduce-4-small": f"all_reduce {MORE_RANKS} {SMALL} {ALL}",
    "all_reduce-4": f"all_reduce {MORE_RANKS} {LARGE} {ALL}",
    "others-2-small": f"{OTHERS} barrier -n 10 {SMALL} {MPIS}",
    "others-2": f"{OTHERS} -n 10 {LARGE} {MPIS}",
    "shared_arrays-2": f"all_reduce {OTHERS} --shared-arrays -b 64K -e 64M -n 10 {MPIS}",
    "unbound-2": f"all_reduce broadcast reduce_scatter all_to_all --unbound -b 1K -e 1K -n 7 {MPIS}",
    "noise-2-small": f"all_reduce --noise -n 10 {SMALL} --vs openmpi",
    "noise-2": "all_reduce --noise -n 10 -b 64K -e 1M -f 16 --vs openmpi",
    "symmetric-2": "all_reduce --symmetric -b 16M -e 64M -n 10",
    "types-2": "all_reduce -b 1M -e 64M -n 10 --dtype float32,float16,bfloat16,float64,int32",
    "operations-2": "all_reduce -b 1M -e 64M -n 10 --op sum,max,min,prod",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", action="store_true", help="install the peers first")
    parser.add_argument("--runs", type=int, default=3, help="default: 3")
    names = several(one_of("measurement", MEASUREMENTS))
    parser.add_argument("--only", type=names, metavar="NAME,...", help=f"of {', '.join(MEASUREMENTS)}")
    arguments = parser.parse_args()
    if arguments.setup_peers:
        ringcomm("bench", "--setup-peers")
    runs = [HERE.parent / "build" / "benchmarks" / machine() / f"run-{i + 1}" for i in range(arguments.runs)]
    for run in runs:
        run.mkdir(parents=True, exist_ok=True)
        for name in arguments.only or MEASUREMENTS:
            file, words = run / f"{name}.json", MEASUREMENTS[name]
            if not file.exists():
                print(f"{run.name}: {words}", flush=True)
                ringcomm("bench", *words.split(), "--json", str(file.with_suffix(".partial")))
                file.with_suffix(".partial").rename(file)
    kept = combine(runs)
    if any(map(is_drawn, kept["rows"])):  # the tables need those
        keep(kept, results_path(".json"))
    return 0


def machine() -> str:
    """Return the name of this kind of machine, as a part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", tuning.machine_name().lower()).strip("-")


def results_path(ending: str) -> Path:
    """Return where today's results of this machine are kept."""
    return HERE / "results" / f"{datetime.date.today()}-{machine()}{ending}"


def combine(runs: list[Path]) -> dict[str, Any]:
    """Return the results of all runs as one, with the row of the median time for each size, library and buffers.

    Its worst round is that of all runs. A measurement that a run lacks is left out.
    """
    kept: dict[str, Any] = {
        "machine": {},
        "versions": {},
        "measurements": MEASUREMENTS,
        "failures": [],
        "rows": [],
        "lines": [],
    }
    for name in MEASUREMENTS:
        if not all((run / f"{name}.json").exists() for run in runs):
            continue
        rows = defaultdict(list)
        for number, run in enumerate(runs, 1):
            data = json.loads((run / f"{name}.json").read_text())
            kept["machine"] = kept["machine"] or data["machine"]
            kept["versions"] |= data["versions"]
            kept["lines"] += data["lines"]
            kept["failures"] += [{"measurement": name, "run": number, **failure} for failure in data["failures"]]
            for row in data["rows"]:
                what = ("library", "ranks", "collective", "bytes", "dtype", "op", "buffers")
                rows[tuple(row[each] for each in what)].append(row)
        for same in rows.values():
            middle = median_low(row["median"] for row in same)
            row = next(row for row in same if row["median"] == middle)
            of_all = {"rounds": sum(row["rounds"] for row in same), "worst": max(row["worst"] for row in same)}
            kept["rows"].append({"measurement": name, **row, **of_all})
    return kept


def keep(data: dict[str, Any], path: Path) -> None:
    """Write the results and their picture."""
    write_json(path, data)
    drawn = [row for row in data["rows"] if is_drawn(row)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(data | {"rows": drawn}, file)
        file.flush()
        ringcomm("plot", file.name, "-o", str(path.with_suffix(".png")))


def is_drawn(row: dict[str, Any]) -> bool:
    if row["measurement"] == "shared_arrays-2":
        return bool(row["library"] == "ringcomm" and row["collective"] == "all_reduce")
    return row["measurement"] in ("all_reduce-2-small", "all_reduce-2")


def ringcomm(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "ringcomm", *words], check=False).returncode
    if status:
        sys.exit(f"ringcomm {' '.join(words)}: status {status}")


if __name__ == "__main__":
    sys.exit(main())
