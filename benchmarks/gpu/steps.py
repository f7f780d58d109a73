"""The steps of benchmarks/gpu_check.py, the most important first: 200 s alone, and 260 s for many processes at once."""

import os
import sys
from pathlib import Path
from typing import Any

from gpu.runner import Step

__all__ = ["GROUPS"]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = sys.executable
RINGCOMM = (PYTHON, "-m", "ringcomm")
KERNELS, PROCESSES = str(HERE / "kernels.py"), str(HERE / "processes.py")
UNDER_MPS = (PYTHON, str(HERE / "under_mps.py"))
SWEEP = (PYTHON, str(ROOT / "benchmarks/gpu_sweep.py"))
EVERY_KERNEL = str(ROOT / "tests/cuda/gpu_kernels.py")
# Without the settings of pyproject.toml, which need plugins.
OPTIONS = f"-c {os.devnull} --rootdir {ROOT} -p no:cacheprovider -v --tb=short --maxfail=8 -o faulthandler_timeout=60"
OPTIONS += " --ranks-world=both"
PYTEST = (PYTHON, "-m", "pytest", *OPTIONS.split(), "-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", "gpu")
TESTED = r"FAILED|ERROR|^E  |passed|failed"
INFO = """
nvidia-smi -L; nvidia-smi --query-gpu=driver_version,memory.total,clocks.sm,compute_mode --format=csv,noheader
lscpu | grep -E 'Model name|^CPU.s|Thread|L3|NUMA'; nvidia-smi topo -m | head -4
$0 - <<'END'
import sys
for name in ("torch", "cupy", "numpy", "ringcomm"):
    try: print(name, __import__(name).__version__)
    except Exception as error: print(name, type(error).__name__, error)
END
"""
OTHERS = "reduce_scatter all_gather broadcast reduce gather scatter all_to_all send_recv"
TABLE = r"(ringcomm|nccl|openmpi|gloo|mpich)\b.*\d|not measured|#.*MPS|Error"


def alone(rows: Path, emulated: bool) -> list[Step]:
    """Return the steps that tell whether all is right, and how fast the kernels are alone."""
    there = ("--rows", str(rows), *["--emulated"] * emulated)

    def kernels(name: str, *words: str, usual: float, limit: float, **facts: Any) -> Step:
        return Step(name, (PYTHON, KERNELS, *words, *there), usual, limit, gpu=not emulated, **facts)

    processes = (*RINGCOMM, "run", "-n", "2", PROCESSES, *there)
    checked = (PYTHON, KERNELS, "values", "symmetric", "--small", "--ranks", "2,3")
    return [
        Step("info", ("bash", "-c", INFO, PYTHON), 8, 40, r".", gpu=False, program="bash"),
        Step("precompile", ("nice", PYTHON, str(HERE / "precompile.py")), 40, 90, background=True),
        kernels("values", "values", usual=9, limit=60),
        kernels("symmetric", "symmetric", usual=4, limit=30),
        Step("processes", processes, 6, 40, r"check=|Error", gpu=not emulated),
        Step("tests", (*PYTEST, str(ROOT / "tests/cuda/test_gpu.py")), 40, 90, TESTED),
        kernels("stress", "stress", usual=12, limit=40, after="precompile"),
        kernels("speed", "speed", "--seconds", "25", usual=12, limit=45, shows=r"check="),
        kernels("dtypes", "dtypes", usual=4, limit=40),
        *(sanitized(tool, checked) for tool in ("memcheck", "synccheck")),
        Step("example", (*RINGCOMM, "run", "-n", "2", str(ROOT / "examples/gpu_allreduce.py")), 10, 30, r"rank|us"),
        Step("doctor", (*RINGCOMM, "doctor"), 5, 40, gpu=False),
        Step("training", (*PYTEST, str(ROOT / "tests/project/test_examples.py")), 74, 150, TESTED, environment=tests()),
    ]


def sanitized(tool: str, command: tuple[str, ...]) -> Step:
    # Not racecheck: it sees shared memory only, which the kernels do not use.
    program = "compute-sanitizer"
    return Step(
        tool, (program, "--tool", tool, "--error-exitcode", "9", *command), 5, 40, r"ERROR SUMMARY|Invalid", program
    )


def many(folder: Path, rows: Path, nccl: Path | None, wheels: Path | None) -> list[Step]:
    """Return the steps in which several processes use a GPU at once, beside NCCL, and all cores of the machine."""
    preload = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} | ({"LD_PRELOAD": str(nccl)} if nccl else {})

    def bench(name: str, words: str, usual: float, limit: float) -> Step:
        file = folder / f"{name}.json"
        options = f"{words} --device cuda --vs nccl -n 7 -w 5 --timeout 25 --json {file}"
        command = (*UNDER_MPS, *RINGCOMM, "bench", *options.split())
        return Step(name, command, usual, limit, TABLE, environment=preload, json=file)

    def under_mps(name: str, *command: str, usual: float, limit: float, shows: str = r"check=|Error") -> Step:
        return Step(name, (*UNDER_MPS, *command), usual, limit, shows, environment=preload)

    def torch(backend: str) -> Step:
        run = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        words = (*run, str(HERE / "torch_speed.py"), "--backend", backend, "--rows", str(rows))
        return under_mps(f"torch-{backend}", *words, usual=25, limit=50)

    at = [str(n) for n in (2, 4, 8)]
    cores = ("-o", str(folder), *(["--wheels", str(wheels)] if wheels else []))
    sweep, profile = folder / "sweep.json", (PYTHON, KERNELS, "speed", "--ranks", "2", "--only", "ring_all_reduce")
    counters = r"Throughput|Duration|Registers|Eligible|L2 Hit|Error"
    ncu = ("ncu", "--clock-control", "none", "--launch-skip", "2", "-c", "1", "-k", "regex:ringcomm_virtual", *profile)
    return [
        bench("nccl", "all_reduce --ranks 2 -b 4 -e 64M -f 8", 15, 60),
        *(
            under_mps(f"mps-{n}", *RINGCOMM, "run", "-n", n, PROCESSES, "--rows", str(rows), usual=4, limit=30)
            for n in at
        ),
        bench("nccl-others", f"{OTHERS} --ranks 2 -b 4K -e 64M -f 128", 28, 70),
        torch("ringcomm"),
        torch("nccl"),
        bench("nccl-4", "all_reduce --ranks 4 -b 4 -e 64M -f 64", 20, 60),
        under_mps("four", *RINGCOMM, "run", "-n", "4", EVERY_KERNEL, usual=10, limit=30, shows=r"right|Error"),
        Step("fail", (*RINGCOMM, "run", "-n", "2", PROCESSES, "--fail", "--rows", str(rows)), 16, 30, r"check=|Error"),
        Step("sweep", (*SWEEP, "--json", str(sweep)), 20, 60, r"ring_all_reduce|Error", json=sweep),
        Step("cores", (PYTHON, str(ROOT / "benchmarks/many_cores.py"), *cores), 50, 110, TABLE, gpu=False),
        Step("ncu", ncu, 11, 30, counters, "ncu"),
    ]


def tests() -> dict[str, str]:
    """Return the environment in which tests find the modules beside them."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT / "tests"), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


GROUPS = {"alone": 200, "many": 260}  # their seconds
