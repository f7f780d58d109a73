"""Measure everything that README.md and docs/performance.md say about speed, three times, and draw it.

    python benchmarks/run.py --setup-peers          the whole of it, about 40 minutes on an idle machine
    python benchmarks/run.py --read results/FOLDER  print the tables of what is there, as lead.md has them

Each run is a folder `run-N` of JSON files that `ringcomm bench` wrote; what is there already is not measured again. The
pictures and lead.md are made from them.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import lead

from ringcomm import tuning

HERE = Path(__file__).parent
PEERS = "--vs gloo,openmpi,mpich"
# File → what `ringcomm bench` is told.
MEASUREMENTS = {
    "all_reduce-2": f"all_reduce {PEERS}",
    # MPICH's waiting ranks keep their cores, and it soon needs minutes for a call: it is left out from there on.
    "all_reduce-4-8": f"all_reduce --ranks 4,8 -e 64M -n 10 --patience 15 {PEERS}",
    "others-2": "reduce_scatter all_gather broadcast reduce gather scatter all_to_all send_recv barrier "
    f"-e 64M -n 10 {PEERS}",
    "symmetric-2": "all_reduce --symmetric",
    "types-2": "all_reduce -b 1M -e 64M --dtype float32,float16,bfloat16,float64,int32",
    "operations-2": "all_reduce -b 1M -e 64M --op sum,max,min,prod",
}
PICTURES = {
    "all_reduce-2.png": ["all_reduce-2", "symmetric-2"],
    "all_reduce-4-8.png": ["all_reduce-4-8"],
    "others-2.png": ["others-2"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup-peers", action="store_true", help="install the peers first")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--only", choices=MEASUREMENTS, metavar="FILE", help="measure this one alone: " + ", ".join(MEASUREMENTS)
    )
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="measure nothing, read these results")
    arguments = parser.parse_args()
    folder = arguments.read or HERE / "results" / name()
    if not arguments.read:
        if arguments.setup_peers:
            bench("--setup-peers")
        for number in range(1, arguments.runs + 1):
            place = folder / f"run-{number}"
            place.mkdir(parents=True, exist_ok=True)
            for file, words in MEASUREMENTS.items():
                data = place / f"{file}.json"
                if arguments.only in (None, file) and not (data.exists() and data.stat().st_size):
                    print(f"run {number} of {arguments.runs}: {words}", flush=True)
                    partial = data.with_suffix(".partial")  # what was interrupted is measured again
                    partial.unlink(missing_ok=True)
                    bench(*words.split(), "--json", str(partial))
                    partial.rename(data)
    runs = [lead.read(place) for place in sorted(folder.glob("run-*"))]
    (folder / "lead.md").write_text(lead.report(runs))
    for picture, files in PICTURES.items():
        data = [str(folder / "run-1" / f"{file}.json") for file in files]
        if all(map(os.path.exists, data)):
            subprocess.run([sys.executable, "-m", "ringcomm", "plot", *data, "-o", folder / picture], check=True)
    print((folder / "lead.md").read_text())
    return 0


def name() -> str:
    cpu = re.sub(r"[^a-z0-9]+", "-", tuning.machine().lower()).strip("-")
    return f"{datetime.date.today()}-{cpu}"


def bench(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "ringcomm", "bench", *words], check=False).returncode
    if status:
        sys.exit(f"ringcomm bench {' '.join(words)}: status {status}")


if __name__ == "__main__":
    sys.exit(main())
