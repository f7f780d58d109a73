"""The CUDA kernels compile for every architecture, without a GPU; and what the compilers made of them is looked at."""

import re
import shutil
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest

import reference
from ringcomm.transports.cuda.calls import KERNELS, MOVED, REASONS, REDUCING
from ringcomm.types import DTYPES, OPS

compiler = pytest.importorskip("ringcomm.devices.compiler", reason="there is no CuPy: pip install cupy-cuda12x")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CODES = {op: code for op, (code, _) in OPS.items()} | {"premul_sum": len(OPS)}
CASE = KERNELS["barrier"], DTYPES["uint8"], CODES["sum"], "sm_90"


def legal(dtype, op):
    """Say whether an operation makes sense; the GPU reduces float8 as any float."""
    op = reference.OPS[-1] if op == "premul_sum" else op
    return reference.legal("float16" if dtype.startswith("float8") else dtype, op)


ARITHMETIC = [(dtype, op) for dtype, op in product(DTYPES, CODES) if legal(dtype, op)]
MOVES = [(dtype, "sum") for dtype, code in DTYPES.items() if code in MOVED.values()]


def table(kernel):
    return ARITHMETIC if kernel in REDUCING else MOVES


def sample():
    """Yield each kernel, those that reduce for each architecture, with the next dtype and the rarest operation yet."""
    taken = []
    for number, kernel in enumerate(KERNELS):
        for architecture in ARCHITECTURES if kernel in REDUCING else [ARCHITECTURES[number % len(ARCHITECTURES)]]:
            dtypes = [*dict(table(kernel))]
            dtype = dtypes[len(taken) % len(dtypes)]
            taken.append(min((op for other, op in table(kernel) if other == dtype), key=taken.count))
            yield kernel, dtype, taken[-1], architecture


SAMPLE = list(sample())
TIGHTEST = ("one_shot", "complex128", "premul_sum", "sm_100")  # nvcc 13 has few registers to spare there
EVERYTHING = [(kernel, dtype, op, arch) for kernel in KERNELS for dtype, op in table(kernel) for arch in ARCHITECTURES]
COLUMNS = ("kernel", "dtype", "op", "architecture")


def numbers(kernel, dtype, op, architecture):
    return KERNELS[kernel], DTYPES[dtype], CODES[op], architecture


def check(made, kernel):
    check_registers(made.report)
    if not kernel.startswith("ring_"):  # what an inner loop has on the stack it reads again after every store
        assert {*re.findall(r"(\d+) bytes stack frame", made.report)} == {"0"}, made.report
    for flag in ("ld.acquire.sys.global.u64", "st.release.sys.global.u64"):
        assert flag in made.ptx
    if kernel == "ll":  # data and flag in one store
        assert "st.relaxed.sys.global.u64" in made.ptx
    if kernel != "barrier":
        assert "ld.global.v4.u32" in made.ptx
        assert "st.global.v4.u32" in made.ptx
    if kernel not in ("barrier", "ll"):  # arrays at multiples of 4, and not of 16
        assert re.search(r"\bst\.(global\.)?[uf]32", made.ptx)
    # What peers write must not be read through the read-only cache; a multiply-add rounds twice; nobody traps.
    for unwanted in ("ld.global.nc", "fma.rn", "trap"):
        assert unwanted not in made.ptx


def check_registers(report):
    """The loops over memory spill nothing; a shell may keep four registers elsewhere while it calls one."""
    pattern = r"properties for (\w+)\s+(?:ptxas\s+\.\s+)?\d+ bytes stack frame, (\d+) bytes spill"
    spilled = {name: int(count) for name, count in re.findall(pattern, report)}
    shells = spilled.pop("ringcomm_kernel"), spilled.pop("ringcomm_virtual")
    assert not any(spilled.values()), report
    assert max(shells) <= 16, report


@pytest.mark.slow
@pytest.mark.parametrize(COLUMNS, SAMPLE)
def test_a_kernel_compiles_by_nvrtc(kernel, dtype, op, architecture):
    check(compiler.compiled(*numbers(kernel, dtype, op, architecture)), kernel)


# About 15 minutes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(COLUMNS, EVERYTHING)
def test_every_kernel_compiles_by_nvrtc(kernel, dtype, op, architecture):
    check(compiler.compiled(*numbers(kernel, dtype, op, architecture)), kernel)


def compile_by_nvcc(case, target):
    """Return the report of ptxas."""
    command = ["nvcc", *compiler.options(*numbers(*case)), "-cubin", "-o", target, compiler.SOURCES / "entry.cu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


has_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")


@pytest.mark.slow
@has_nvcc
@pytest.mark.parametrize(COLUMNS, [*SAMPLE[::4], TIGHTEST])
def test_a_kernel_compiles_by_nvcc(kernel, dtype, op, architecture, tmp_path):
    check_registers(compile_by_nvcc((kernel, dtype, op, architecture), tmp_path / "cubin"))


# About 40 minutes.
@pytest.mark.exhaustive
@has_nvcc
@pytest.mark.parametrize(COLUMNS, EVERYTHING)
def test_every_kernel_compiles_by_nvcc(kernel, dtype, op, architecture, tmp_path):
    check_registers(compile_by_nvcc((kernel, dtype, op, architecture), tmp_path / "cubin"))


def test_the_sample_has_every_kernel_every_dtype_and_every_operation():
    kernels, dtypes, ops, _ = zip(*SAMPLE, strict=True)
    assert set(kernels) == {*KERNELS}
    assert set(dtypes) == {*DTYPES}
    assert set(ops) == {*CODES}


def enumerated(file, name):
    """Return the names of an enum of the sources, in their order."""
    body = re.search(rf"enum {name}\b.*?{{(.*?)}}", (compiler.SOURCES / file).read_text(), re.DOTALL)[1]
    return re.findall(r"^ *(\w+)", body, re.MULTILINE)


def test_kernels_and_reasons_have_the_numbers_of_the_sources():
    assert [*KERNELS, "kernels"] == [name.lower() for name in enumerated("kernels.cuh", "Kernel")]
    assert [name.replace(" ", "_").upper() or "NO_REASON" for name in REASONS] == enumerated("call.cuh", "Reason")


# ---- What was compiled is kept.


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the compiler was asked in a home where nothing is kept yet. It answers with the number of the question."""
    questions = []

    def answer(*question):
        questions.append(question)
        return compiler.Compiled(b"%d" % len(questions), "", "")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", answer)
    return questions


def test_a_kernel_is_compiled_once(asked):
    assert [compiler.cubin(*CASE) for _ in range(3)] == [b"1"] * 3
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_whatever_changes_is_compiled_anew(monkeypatch):
    before = compiler.cubin(*CASE)
    others = {compiler.cubin(*CASE[:i], value, *CASE[i + 1 :]) for i, value in enumerate((1, 1, 1, "sm_80"))}
    real = compiler.options(*CASE), compiler._sources()
    for name, changed in {
        "options": lambda *_: (*real[0], "-G"),
        "_sources": lambda: real[1] | {"call.cuh": "// new"},
        "nvrtc": SimpleNamespace(getVersion=lambda: (99, 0)),
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(compiler, name, changed)
            others.add(compiler.cubin(*CASE))
    assert len({before, *others}) == 1 + len(CASE) + 3
    assert compiler.cubin(*CASE) == before


@pytest.mark.usefixtures("asked")
def test_a_home_that_takes_no_files_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert [compiler.cubin(*CASE) for _ in range(2)] == [b"1", b"2"]


@pytest.mark.slow
def test_two_processes_that_compile_the_same_at_once_keep_one_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = "import sys; from ringcomm.devices.compiler import cubin; print(flush=True); input()"
    command = [sys.executable, "-c", f"{words}; sys.stdout.buffer.write(cubin{CASE})"]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for rank in ranks:
        rank.stdout.readline()  # all is imported
    for rank in ranks:
        rank.stdin.write(b"\n")
        rank.stdin.flush()
    codes = {rank.communicate()[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    (kept,) = tmp_path.glob("**/cuda/*")
    assert codes == {kept.read_bytes()}
    assert kept.read_bytes().startswith(b"\x7fELF")
