"""`ringcomm doctor`: the checks, those of GPUs on a fake CuPy."""

import os
import re
from types import SimpleNamespace

import pytest

from ringcomm import RingcommError
from ringcomm.commands import doctor
from ringcomm.commands.cli import main
from ringcomm.devices import emulated
from ringcomm.torch.compat import native


class Runtime:
    """Four GPUs; the last has no peer access."""

    CUDARuntimeError = RuntimeError

    def __init__(self, driver=13000, gpus=4):
        self.driver, self.gpus = driver, gpus

    def driverGetVersion(self):  # noqa: N802
        return self.driver

    def runtimeGetVersion(self):  # noqa: N802
        return 12090

    def getDeviceCount(self):  # noqa: N802
        if not self.gpus:
            raise self.CUDARuntimeError("cudaErrorNoDevice: none is visible")
        return self.gpus

    def getDeviceProperties(self, ordinal):  # noqa: N802
        return {"name": f"GPU of type {ordinal}".encode(), "major": 9, "minor": 0}

    def deviceCanAccessPeer(self, one, other):  # noqa: N802
        return int(max(one, other) < 3)


def install(monkeypatch, runtime):
    monkeypatch.setattr(doctor, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


@pytest.mark.slow
def test_ranks_work_here(capsys):
    assert main(["doctor"]) == 0
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert found.keys() == doctor.CHECKS.keys()
    assert all(mark in ("ok", "no") for mark, _ in found.values())
    for name in ("system", "kernels", "memfd", "descriptors", "ranks", "numpy"):
        assert found[name][0] == "ok"
    assert found["cores"][1].startswith(f"{len(os.sched_getaffinity(0))} by affinity")


def test_checks_continue_after_a_failure_and_the_status_is_1_if_ranks_cannot_work(monkeypatch, capsys):
    def fail(*_, **__):
        raise RingcommError("no memory")

    monkeypatch.setattr(doctor, "launch", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ranks        no  no memory\n" in out
    assert "numpy        ok " in out


def test_a_missing_package_has_its_install_command(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"mpi4py": lambda: doctor.package("'ringcomm[mpi]'", "no-such-package")})
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "mpi4py       no  not installed: pip install 'ringcomm[mpi]'\n"


@pytest.mark.parametrize(
    ("python_backends", "built", "answer"),
    [(True, None, "needs none"), (False, "a module", "built for torch"), (False, None, None)],
)
def test_what_torch_lacks_without_the_extension_is_named(monkeypatch, python_backends, built, answer):
    monkeypatch.setattr(native, "PYTHON_BACKENDS", python_backends)
    monkeypatch.setattr(native, "extension", lambda: built)
    if answer:
        assert answer in doctor.torch_extension()
    else:
        with pytest.raises(RingcommError, match=r"second backend.*types of errors.*python -m ringcomm\.torch"):
            doctor.torch_extension()


def test_gpus_are_listed_with_the_cuda_versions(monkeypatch):
    install(monkeypatch, Runtime(gpus=2))
    names = "0: GPU of type 0 (sm_90), 1: GPU of type 1 (sm_90)"
    assert doctor.cuda() == f"{names}; the driver supports CUDA 13.0, CuPy uses 12.9"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"driver": 0}, "no NVIDIA driver is installed"), ({"gpus": 0}, "cudaErrorNoDevice: none is visible")],
)
@pytest.mark.parametrize("check", [doctor.cuda, doctor.gpu_pairs, doctor.gpu_ranks])
def test_without_a_gpu_the_reason_is_reported(monkeypatch, check, facts, reason):
    install(monkeypatch, Runtime(**facts))
    with pytest.raises(RingcommError, match=f"no CUDA device: {reason}"):
        check()


def test_gpu_pairs_are_grouped_by_their_access(monkeypatch):
    install(monkeypatch, Runtime())
    assert doctor.gpu_pairs() == ("peer access: 0-1 0-2 1-2; no peer access: 0-3 1-3 2-3 (link: nvidia-smi topo -m)")
    install(monkeypatch, Runtime(gpus=1))
    assert doctor.gpu_pairs() == "one GPU"


def test_a_missing_cupy_is_reported(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(doctor, "import_module", missing)
    with pytest.raises(RingcommError, match="needs CuPy: No module named 'cupy'"):
        doctor.cuda()


def test_how_gpus_share_memory_is_told_with_the_reason():
    text = (
        r"shared with other processes by file descriptors \(cuMemExportToShareableHandle\): this process sees one GPU"
    )
    assert re.match(text, doctor.describe_sharing(emulated.device.gpu))


@pytest.mark.parametrize(
    ("answers", "text"),
    [({103: 0}, "cudaIpc: the driver has no file descriptors"), ({103: 1}, "cudaIpc: this process sees 4 GPUs")],
)
def test_memory_of_several_gpus_or_of_an_old_driver_is_shared_by_cuda_ipc(monkeypatch, answers, text):
    def count(name, found, *_):
        assert name == "cuDeviceGetCount"
        found._obj.value = 4

    gpu = emulated.device.gpu
    monkeypatch.setattr(gpu, "driver", count)
    monkeypatch.setattr(gpu, "_attribute", answers.__getitem__)
    assert text in doctor.describe_sharing(gpu)
