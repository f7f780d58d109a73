"""The CUDA kernels compile for every architecture, without a GPU, and their machine code is checked."""

import re
import shutil
import subprocess
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest

from cases import reference
from ringcomm import premul_sum
from ringcomm.devices.contract import KernelVariant
from ringcomm.types import DTYPES, KERNELS, OPS, REDUCING_KERNELS, TABLES

compiler = pytest.importorskip("ringcomm.devices.compiler", reason="CuPy is not installed: pip install cupy-cuda12x")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CODES = {op: code for op, (code, _) in OPS.items()} | {"premul_sum": OPS[premul_sum(1)][0]}
CASE = KernelVariant(KERNELS["barrier"], DTYPES["uint8"], CODES["sum"]), "sm_90"


def legal(dtype, op):
    """Return whether a dtype has an operation; the GPU reduces float8 as any float."""
    op = reference.OPS[-1] if op == "premul_sum" else op
    return reference.legal("float16" if dtype.startswith("float8") else dtype, op)


ARITHMETIC = [(dtype, op) for dtype, op in product(DTYPES, CODES) if legal(dtype, op)]
MOVES = [(dtype, "sum") for dtype in ("uint8", "uint16", "uint32", "uint64", "complex128")]  # one of each size


def table(kernel):
    return ARITHMETIC if kernel in REDUCING_KERNELS else MOVES


def sample():
    """Yield each kernel, reducing ones for each architecture, with the next dtype and the rarest operation so far."""
    taken = []
    for number, kernel in enumerate(KERNELS):
        every = kernel in REDUCING_KERNELS
        for architecture in ARCHITECTURES if every else [ARCHITECTURES[number % len(ARCHITECTURES)]]:
            dtypes = [*dict(table(kernel))]
            dtype = dtypes[len(taken) % len(dtypes)]
            taken.append(min((op for other, op in table(kernel) if other == dtype), key=taken.count))
            yield kernel, dtype, taken[-1], architecture


SAMPLE = list(sample())
TIGHTEST = ("one_shot", "complex128", "premul_sum", "sm_100")  # nvcc 13 has few registers to spare there
# Data that peers write must not pass through the read-only cache; a multiply-add rounds twice; no kernel traps.
UNWANTED = ("ld.global.nc", "fma.rn", "trap")
COLUMNS = ("kernel", "dtype", "op", "architecture")


def variant(kernel, dtype, op, architecture):
    return KernelVariant(KERNELS[kernel], DTYPES[dtype], CODES[op]), architecture


@cache  # some are looked at by several tests
def compiled(*of):
    return compiler.compiled(*variant(*of))


def check(made, kernel):
    check_registers(made.report, kernel)
    if not kernel.startswith("ring_"):  # an inner loop reloads its stack variables after every store
        assert {*re.findall(r"(\d+) bytes stack frame", made.report)} == {"0"}, made.report
    for flag in ("ld.acquire.sys.global.u64", "st.release.sys.global.u64"):
        assert flag in made.ptx
    if kernel == "ll":  # data and flags in one access
        assert "st.relaxed.sys.global.v2.u64" in made.ptx
        assert "ld.relaxed.sys.global.v2.u64" in made.ptx
    if kernel != "barrier":
        assert "ld.global.v4.u32" in made.ptx
        assert "st.global.v4.u32" in made.ptx
    if kernel not in ("barrier", "ll"):  # arrays aligned to 4 bytes but not to 16
        assert re.search(r"\bst\.(global\.)?[uf]32", made.ptx)
    for unwanted in UNWANTED:
        assert unwanted not in made.ptx


def check_registers(report, kernel):
    """Loops over memory spill nothing; an entry point may save four registers around its calls, of a ring 32."""
    found = spilled(report)
    entries = found.pop("ringcomm_kernel"), found.pop("ringcomm_virtual")
    assert not any(found.values()), report
    assert max(entries) <= (128 if kernel.startswith("ring_") else 16), report


def spilled(report):
    """Return the bytes that each function spills; where two entry points have a copy of it, the last one's."""
    pattern = r"properties for (\w+)\s+(?:ptxas\s+\.\s+)?\d+ bytes stack frame, (\d+) bytes spill"
    return {name: int(count) for name, count in re.findall(pattern, report)}


@pytest.mark.slow
@pytest.mark.parametrize(COLUMNS, SAMPLE)
def test_a_kernel_compiles_by_nvrtc(kernel, dtype, op, architecture):
    check(compiled(kernel, dtype, op, architecture), kernel)


# The conversion of two elements to float32's accumulator and back, and the last architecture without it.
PAIRS = {
    "float16": ("cvt.rn.f16x2.f32", ""),
    "bfloat16": ("cvt.rn.bf16x2.f32", ""),
    "float8_e4m3fn": ("cvt.rn.satfinite.e4m3x2.f32", "sm_80"),
    "float8_e5m2": ("cvt.rn.satfinite.e5m2x2.f32", "sm_80"),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", PAIRS)
def test_a_ring_converts_small_floats_in_pairs(dtype, architecture):
    made = compiled("ring_all_reduce", dtype, "sum", architecture)
    instruction, without = PAIRS[dtype]
    assert (instruction in made.ptx) == (architecture != without)
    if architecture != "sm_100" and dtype in ("float16", "bfloat16"):
        assert spilled(made.report)["ringcomm_kernel"] == 0, made.report


SWITCHED = {"float32": ".v4.f32", "float16": ".acc::f32.v4.f16x2", "bfloat16": ".acc::f32.v4.bf16x2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtype", "op", "architecture"),
    [
        *product(["ring_all_reduce"], SWITCHED, ["sum"], ["sm_90", "sm_100"]),
        ("ring_reduce_scatter", "float32", "sum", "sm_90"),
        ("ring_all_gather", "uint64", "sum", "sm_90"),
        ("ring_all_reduce", "float32", "sum", "sm_80"),
        ("ring_all_reduce", "float32", "max", "sm_90"),
        ("ring_all_reduce", "int32", "sum", "sm_90"),
    ],
)
def test_the_switch_does_what_it_has(kernel, dtype, op, architecture):
    made = compiled(kernel, dtype, op, architecture)
    has = architecture != "sm_80" and (kernel == "ring_all_gather" or (dtype in SWITCHED and op == "sum"))
    reads, stores = has and kernel != "ring_all_gather", has and kernel != "ring_reduce_scatter"
    assert re.findall(r"multimem\.ld_reduce\S+", made.ptx) == [
        f"multimem.ld_reduce.relaxed.sys.global.add{SWITCHED[dtype]}" for _ in range(4 * reads)
    ]
    assert made.ptx.count("multimem.st.relaxed.sys.global.v4.f32") == 4 * stores
    assert made.ptx.count("fence.proxy.alias") == 4 * (reads or stores)  # two in each entry point


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_messages_compile_by_nvrtc(architecture):
    made = compiler.compiled(None, architecture)
    assert "Compiling entry function 'ringcomm_messages'" in made.report
    check_messages(made.report)
    for access in ("ld.acquire.sys.global.u64", "st.release.sys.global.u64", "ld.global.v4.u32", "st.global.v4.u32"):
        assert access in made.ptx
    for unwanted in UNWANTED:
        assert unwanted not in made.ptx


def check_messages(report):
    """No thread has a stack: after a wait it would be read from the L2 cache."""
    assert {*re.findall(r"(\d+) bytes (?:stack frame|spill)", report)} == {"0"}, report


# About 15 minutes.
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles_by_nvrtc(kernel, architecture):
    for dtype, op in table(kernel):
        check(compiler.compiled(*variant(kernel, dtype, op, architecture)), kernel)


def compile_by_nvcc(case, target):
    """Return the report of ptxas."""
    return run_nvcc(compiler.options(*variant(*case)), target)


def run_nvcc(flags, target):
    folders = (f"-I{folder}" for folder in (TABLES.parents[1], compiler.SOURCES.parents[1]))
    options = [*flags, *folders, "-cubin", "-o", target]
    command = ["nvcc", *options, compiler.SOURCES / "entry.cu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


has_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


@pytest.mark.slow
@has_nvcc
@pytest.mark.parametrize(COLUMNS, [*SAMPLE[::8], TIGHTEST])
def test_a_kernel_compiles_by_nvcc(kernel, dtype, op, architecture, tmp_path):
    check_registers(compile_by_nvcc((kernel, dtype, op, architecture), tmp_path / "cubin"), kernel)


@has_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_messages_compile_by_nvcc(architecture, tmp_path):
    check_messages(run_nvcc(compiler.options(None, architecture), tmp_path / "cubin"))


# About 40 minutes.
@pytest.mark.exhaustive
@has_nvcc
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles_by_nvcc(kernel, architecture, tmp_path):
    for dtype, op in table(kernel):
        check_registers(compile_by_nvcc((kernel, dtype, op, architecture), tmp_path / "cubin"), kernel)


def test_the_sample_has_every_kernel_every_dtype_and_every_operation():
    kernels, dtypes, ops, _ = zip(*SAMPLE, strict=True)
    assert set(kernels) == {*KERNELS}
    assert set(dtypes) == {*DTYPES}
    assert set(ops) == {*CODES}


# ---- The cache.


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """Compilations requested with an empty cache, each answered with its number."""
    requests = []

    def answer(*request):
        requests.append(request)
        return compiler.Compiled(b"%d" % len(requests), "", "")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", answer)
    return requests


def test_a_kernel_is_compiled_once(compilations):
    assert [compiler.cubin(*CASE) for _ in range(3)] == [b"1"] * 3
    assert len(compilations) == 1


@pytest.mark.usefixtures("compilations")
def test_a_change_of_any_input_compiles_again(monkeypatch):
    variant, architecture = CASE
    before = compiler.cubin(*CASE)
    others = {compiler.cubin(variant._replace(**{field: 1}), architecture) for field in variant._fields}
    others.add(compiler.cubin(variant, "sm_80"))
    real = compiler.options(*CASE), compiler._sources()
    for name, changed in {
        "options": lambda *_: (*real[0], "-G"),
        "_sources": lambda: real[1] | {"call.cuh": "// new"},
        "nvrtc": SimpleNamespace(getVersion=lambda: (99, 0)),
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(compiler, name, changed)
            others.add(compiler.cubin(*CASE))
    assert len({before, *others}) == 8
    assert compiler.cubin(*CASE) == before


@pytest.mark.usefixtures("compilations")
def test_a_kernel_whose_file_is_damaged_or_planted_is_compiled_again(tmp_path):
    assert compiler.cubin(*CASE) == b"1"
    (file,) = (tmp_path / ".cache/ringcomm/cuda").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert [compiler.cubin(*CASE) for _ in range(2)] == [b"2"] * 2
    file.write_bytes(b"planted")
    assert compiler.cubin(*CASE) == b"3"
    (tmp_path / ".cache/ringcomm").chmod(0o777)
    assert [compiler.cubin(*CASE) for _ in range(2)] == [b"4", b"5"]


@pytest.mark.usefixtures("compilations")
def test_a_home_that_cannot_be_written_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert [compiler.cubin(*CASE) for _ in range(2)] == [b"1", b"2"]
