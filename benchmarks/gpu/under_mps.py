"""Run a command under NVIDIA's MPS, in a folder of its own: python benchmarks/gpu/under_mps.py COMMAND …

MPS lets the kernels of several processes run on one GPU at the same time. Without it they take turns of about two
milliseconds, so that no time of a collective between them means anything.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ringcomm import RingcommError

__all__ = ["started_mps"]

PROGRAM = "nvidia-cuda-mps-control"
FOLDERS = ("/usr/local/nvidia/bin",)  # beside PATH: where container runtimes mount the driver's programs
START_TIMEOUT = 10.0  # seconds
QUIT_TIMEOUT = 5.0  # seconds in which it ends by itself


@contextmanager
def started_mps() -> Iterator[dict[str, str]]:
    """Start MPS in a folder of its own and yield the environment of its clients; end it at the end of the block.

    Raises RingcommError if it does not start. No setting of the GPU changes.
    """
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(FOLDERS))
    if program is None:
        raise RingcommError(f"{PROGRAM}, which comes with the driver, is neither in PATH nor in {FOLDERS[0]}")
    with TemporaryDirectory(prefix="ringcomm-mps-", ignore_cleanup_errors=True) as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
        clients = {name: os.path.join(folder, part) for name, part in names.items()}
        for path in clients.values():
            os.mkdir(path)
        environment = {**os.environ, **clients}
        try:
            start(program, environment, Path(folder, "output"))
            yield clients
        finally:
            end(program, environment, Path(clients["CUDA_MPS_PIPE_DIRECTORY"], f"{PROGRAM}.pid"))


def start(program: str, environment: dict[str, str], log: Path) -> None:
    """Start the daemon; its parent ends when it accepts clients."""
    with log.open("wb") as output:  # not a pipe, which the daemon would keep open
        none = subprocess.DEVNULL
        try:
            status = subprocess.run(
                [program, "-d"], stdin=none, stdout=output, stderr=output, env=environment, timeout=START_TIMEOUT
            ).returncode
        except OSError as error:
            raise RingcommError(f"{program} cannot be run: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise RingcommError(f"{program} -d did not start MPS within {START_TIMEOUT:g} s") from None
    if status:
        reason = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise RingcommError(f"{program} -d did not start MPS, status {status}: {reason}")


def end(program: str, environment: dict[str, str], pid_file: Path) -> None:
    """End the daemon and its server, by force if they do not end by themselves."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([program], input=b"quit\n", env=environment, timeout=QUIT_TIMEOUT, capture_output=True)
        deadline = time.monotonic() + QUIT_TIMEOUT
        while runs(pid):
            if time.monotonic() > deadline:
                # The daemon leads a session of its own, in which its server runs.
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
                return
            time.sleep(0.01)


def runs(pid: int) -> bool:
    """Return whether the process has not ended; one that waits for its parent has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    try:
        with started_mps() as clients:
            sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **clients}).returncode)
    except RingcommError as error:
        sys.exit(str(error))
