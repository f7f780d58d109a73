"""Measure ringcomm beside Gloo, Open MPI and MPICH on this machine, and keep one JSON file and one picture in results/.

    python benchmarks/run.py --setup-peers    about 40 minutes on an idle machine

Every measurement is a run of `ringcomm bench`, repeated three times. Its files go to build/benchmarks/; an interrupted
run continues there. The kept results have the run with the median time of each row. tables.py makes docs/performance.md
from them.
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

HERE = Path(__file__).parent
PEERS = "--vs gloo,openmpi,mpich"
# Name → arguments of `ringcomm bench`.
MEASUREMENTS = {
    "all_reduce-2": f"all_reduce {PEERS}",
    # Waiting ranks of MPICH keep their cores, and a call soon takes minutes: the timeout ends MPICH there.
    "all_reduce-4-8": f"all_reduce --ranks 4,8 -e 64M -n 10 --timeout 15 {PEERS}",
    "others-2": "reduce_scatter all_gather broadcast reduce gather scatter all_to_all send_recv barrier "
    f"-e 64M -n 10 {PEERS}",
    "symmetric-2": "all_reduce --symmetric",
    "types-2": "all_reduce -b 1M -e 64M --dtype float32,float16,bfloat16,float64,int32",
    "operations-2": "all_reduce -b 1M -e 64M --op sum,max,min,prod",
}
PICTURE = ("all_reduce-2", "symmetric-2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", action="store_true", help="install the peers first")
    parser.add_argument("--runs", type=int, default=3, help="default: 3")
    arguments = parser.parse_args()
    if arguments.setup_peers:
        ringcomm("bench", "--setup-peers")
    runs = [HERE.parent / "build" / "benchmarks" / machine() / f"run-{i + 1}" for i in range(arguments.runs)]
    for run in runs:
        run.mkdir(parents=True, exist_ok=True)
        for name, words in MEASUREMENTS.items():
            file = run / f"{name}.json"
            if not file.exists():
                print(f"{run.name}: {words}", flush=True)
                ringcomm("bench", *words.split(), "--json", str(file.with_suffix(".partial")))
                file.with_suffix(".partial").rename(file)
    keep(combine(runs), results_path(".json"))
    return 0


def machine() -> str:
    """Return the name of this kind of machine, as a part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", tuning.machine_name().lower()).strip("-")


def results_path(ending: str) -> Path:
    """Return where today's results of this machine are kept."""
    return HERE / "results" / f"{datetime.date.today()}-{machine()}{ending}"


def combine(runs: list[Path]) -> dict[str, Any]:
    """Return the results of all runs as one, with the row of the median time for each size, library and buffers."""
    kept: dict[str, Any] = {"machine": {}, "versions": {}, "measurements": MEASUREMENTS, "failures": [], "rows": []}
    for name in MEASUREMENTS:
        rows = defaultdict(list)
        for number, run in enumerate(runs, 1):
            data = json.loads((run / f"{name}.json").read_text())
            kept["machine"] = kept["machine"] or data["machine"]
            kept["versions"] |= data["versions"]
            kept["failures"] += [{"measurement": name, "run": number, **failure} for failure in data["failures"]]
            for row in data["rows"]:
                what = ("library", "ranks", "collective", "bytes", "dtype", "op", "buffers")
                rows[tuple(row[each] for each in what)].append(row)
        for same in rows.values():
            middle = median_low(row["median"] for row in same)
            kept["rows"].append({"measurement": name, **next(row for row in same if row["median"] == middle)})
    return kept


def keep(data: dict[str, Any], path: Path) -> None:
    """Write the results and their picture."""
    write_json(path, data)
    drawn = [row for row in data["rows"] if row["measurement"] in PICTURE]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(data | {"rows": drawn}, file)
        file.flush()
        ringcomm("plot", file.name, "-o", str(path.with_suffix(".png")))


def ringcomm(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "ringcomm", *words], check=False).returncode
    if status:
        sys.exit(f"ringcomm {' '.join(words)}: status {status}")


if __name__ == "__main__":
    sys.exit(main())
