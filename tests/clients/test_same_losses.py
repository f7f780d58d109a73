"""Programs of real clients of torch.distributed, each run on Gloo and on ringcomm: they must compute the same.

The clients are those of the dependency group `clients`; `pytest tests/clients` runs these tests.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
BACKENDS = ("gloo", "ringcomm")
LIMIT = 200  # seconds for a program; most take less than ten on both backends, those that compile a minute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 20)]


def program(name, size, client="torch"):
    """Return a file of programs/ and its number of ranks as parameters, skipped without the client."""
    needed = pytest.mark.skipif(not find_spec(client), reason=f"needs {client}: pip install --group clients")
    return pytest.param(name, size, marks=needed, id=f"{name}-{size}")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        program("lightning_trainer", 2, "lightning"),
        program("lightning_sharded", 2, "lightning"),
        program("lightning_fabric", 2, "lightning"),
        program("accelerate_loop", 2, "accelerate"),
        program("hf_trainer", 2, "transformers"),
        *(program("hf_weights", size, "transformers") for size in (1, 2, 4)),
        *(program("hf_tensor_parallel", size, "transformers") for size in (2, 4)),
        program("deepspeed_zero", 2, "deepspeed"),
        program("torchmetrics_states", 4, "torchmetrics"),
        program("ignite_trainer", 2, "ignite"),
        program("async_checkpoint", 2),
        program("pipeline_and_tensor_parallel", 4),
        program("compiled_ddp", 2),
        program("sharded_parameters", 2),
    ],
)
def test_a_program_computes_what_it_computes_on_gloo(name, size, tmp_path):
    python(HERE / "launch.py", name, size, *BACKENDS, folder=tmp_path)
    assert_same_results(tmp_path)


def test_torchrun_restarts_a_program_of_which_a_rank_fails(tmp_path):
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"
    # torch 2.13 keeps its store over restarts, and Gloo takes the addresses of the ended ranks from it.
    settings = {"gloo": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "ringcomm": {}}
    for backend in BACKENDS:
        python(*torchrun, HERE / "programs" / "elastic_restart.py", backend, folder=tmp_path, **settings[backend])
    assert_same_results(tmp_path)


@pytest.mark.skipif(not find_spec("torchft"), reason="needs torchft-nightly: pip install --group clients")
def test_torchft_goes_on_without_a_killed_replica_and_with_it_again(tmp_path):
    for backend in BACKENDS:
        python(HERE / "programs" / "torchft_replicas.py", backend, folder=tmp_path)
    assert_same_results(tmp_path)


def python(*arguments, folder, **settings):
    """Run Python with these arguments, and end all processes that it has started."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        **settings,
    }
    command = [sys.executable, *map(str, arguments)]
    log = folder / "log"
    with log.open("w") as output:
        started = {"env": environment, "cwd": folder, "stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, **started)
    try:
        status = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        status = f"none within {LIMIT} s"
        process.terminate()  # torchrun ends its ranks, which are in other process groups
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert status == 0, log.read_text()[-8000:]


def assert_same_results(folder):
    """Compare what the ranks have returned, which is in a file for each backend."""
    theirs, ours = (json.loads((folder / f"{backend}.json").read_text()) for backend in BACKENDS)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
