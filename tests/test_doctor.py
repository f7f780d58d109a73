"""What `ringcomm doctor` says about GPUs, seen on a fake CuPy."""

from types import SimpleNamespace

import pytest

from ringcomm import RingcommError, doctor


class Runtime:
    """Four GPUs; the last reaches nobody."""

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

    def deviceCanAccessPeer(self, here, there):  # noqa: N802
        return int(max(here, there) < 3)


def have(monkeypatch, runtime):
    cuda = SimpleNamespace(runtime=runtime, Device=lambda ordinal: SimpleNamespace(pci_bus_id=str(ordinal)))
    monkeypatch.setattr(doctor, "cupy", lambda: SimpleNamespace(cuda=cuda))


def test_gpus_are_named_with_the_versions_that_matter(monkeypatch):
    have(monkeypatch, Runtime(gpus=2))
    names = "0: GPU of type 0 (sm_90), 1: GPU of type 1 (sm_90)"
    assert doctor.cuda() == f"{names}; the driver is for CUDA 13.0, CuPy uses 12.9"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"driver": 0}, "no NVIDIA driver is installed"), ({"gpus": 0}, "cudaErrorNoDevice: none is visible")],
)
@pytest.mark.parametrize("check", [doctor.cuda, doctor.gpu_pairs, doctor.gpu_ranks])
def test_without_a_gpu_the_reason_is_said(monkeypatch, check, facts, reason):
    have(monkeypatch, Runtime(**facts))
    with pytest.raises(RingcommError, match=f"no CUDA device: {reason}"):
        check()


def test_pairs_of_gpus_are_sorted_by_how_they_reach_each_other(monkeypatch):
    have(monkeypatch, Runtime())
    monkeypatch.setattr(doctor, "link", lambda here, there: "over PCIe" if here == "1" else "over NVLink")
    assert doctor.gpu_pairs() == "over NVLink: 0-1 0-2; not at all: 0-3 1-3 2-3; over PCIe: 1-2"


def test_one_gpu_has_no_pairs(monkeypatch):
    have(monkeypatch, Runtime(gpus=1))
    assert doctor.gpu_pairs() == "one GPU"


def test_a_missing_cupy_is_a_reason_too(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(doctor, "import_module", missing)
    with pytest.raises(RingcommError, match="needs CuPy: No module named 'cupy'"):
        doctor.cuda()
