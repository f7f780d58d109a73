"""The figures of GPUs in docs/gpu.md, docs/performance.md and README.md, from a folder of results/.

python benchmarks/gpu_tables.py    writes them into all three
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tables import joined, short, speedups, table
from tables import page as replaced

from ringcomm.options import readable

__all__ = ["FOLDER", "PAGES", "page"]

HERE = Path(__file__).parent
FOLDER = HERE / "results" / "2026-11-28-nvidia-h200"
BEGIN = "<!-- tables: benchmarks/gpu_tables.py -->\n"
KIB, MIB = 1 << 10, 1 << 20
GRAPH, QUEUED, HOST, ALONE = "graph_us", "device_us", "host_us", "alone_us"

Row = dict[str, Any]


def rows(name: str, **fixed: object) -> list[Row]:
    """Return the rows of a file that have these values."""
    found: list[Row] = json.loads((FOLDER / f"{name}.json").read_text())["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in fixed.items())]


def page(text: str, made: str) -> str:
    """Return the text of a page with these tables."""
    return replaced(text, made, BEGIN)


def of_readme() -> Iterator[str]:
    yield of_torch((GRAPH, QUEUED))
    graph, called = ratios(torch_times(GRAPH)), ratios(bench_times("nccl", "all_reduce", MIB))
    yield (
        f"In a graph ringcomm was {span(graph)} times as fast as NCCL. A call from Python with CuPy arrays took "
        f"{span((1 / ratio for ratio in called), 0)} times as long as NCCL's, up to 1 MiB."
    )


def of_gpu() -> Iterator[str]:
    yield "**The kernels alone**, n ranks in one grid, in a CUDA graph, all_reduce of float32, µs:"
    sizes = [4, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for n in (2, 4, 8):
        for row in rows("kernels", n=n):
            if "collective" not in row:
                found[f"`{row['kernel']}`, n = {n}"][row["bytes"]] = short(row["us"])
    yield table(map(readable, sizes), {name: cells(each, sizes) for name, each in sorted(found.items())})
    [copy], [empty] = rows("kernels", check="copy"), rows("kernels", check="empty-kernel-in-graph")
    yield f"A copy on the device: {copy['GBps']:,.0f} GB/s; a kernel that fills one byte: {empty['us']:.1f} µs."
    yield "The ring's bandwidth over that of a copy (both read and write as many bytes):"
    yield table(*of_ring())
    yield "The other collectives, n = 2 / n = 8, µs; *symmetric*: on symmetric buffers:"
    yield of_others()
    yield "**Two processes on the GPU**, under MPS, beside NCCL 2.32.3: all_reduce of torch's float32 tensors, µs:"
    yield of_torch((GRAPH, QUEUED, HOST, ALONE))
    ddp = json.loads((FOLDER / "torch.json").read_text())["ddp"]
    (ours, without), (nccl, nccl_without) = ([ddp[name][key][1] for key in ddp[name] if "ms" in key] for name in ddp)
    yield (
        f"A DDP step of {ddp['ringcomm']['parameters'] / 1e6:.0f} million float32 parameters took {ours:.1f} ms with "
        f"ringcomm and {nccl:.1f} ms with NCCL ({without:.1f} and {nccl_without:.1f} ms without communication)."
    )
    yield "`ringcomm bench`, CuPy arrays, calls queued, ringcomm / NCCL, µs a call:"
    for file in ("nccl", "nccl-others"):
        yield of_bench(file)


def of_performance() -> Iterator[str]:
    yield "Open MPI's time over ringcomm's, rotated buffers; the first column also has ringcomm's time:"
    found: dict[str, dict[int, str]] = {}
    for n in (2, 4, 8, 16):
        [gains] = speedups(rows(f"cores-{n}")).values()
        times = {row["bytes"]: row["median"] for row in rows(f"cores-{n}", library="ringcomm", buffers="rotated")}
        measured = (short(each["rotated"]) for each in gains.values())
        found[f"{n} ranks"] = dict(zip(times, measured, strict=True))
        found[f"{n} ranks"][4] += f" ({short(times[4] * 1e6)} µs)"
    sizes = list(found["2 ranks"])
    yield table(map(readable, sizes), {name: cells(each, sizes) for name, each in found.items()})
    yield "8 ranks, the other collectives:"
    others: dict[str, dict[int, str]] = defaultdict(dict)
    for what, gain in speedups(rows("cores-8-others")).items():
        for size, each in gain.items():
            others[what.partition(",")[0]][size] = short(each.get("rotated", each.get("cached", 0.0)))
    sizes = sorted({size for each in others.values() for size in each})
    yield table(map(readable, sizes), {name: cells(each, sizes) for name, each in others.items()})


def of_torch(measures: Iterable[str]) -> str:
    titles = {GRAPH: "in a CUDA graph", QUEUED: "called, queued", HOST: "called, host time", ALONE: "called, alone"}
    sizes = [4, KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    found = {
        f"{library}, {titles[measure]}": cells({size: short(us) for size, us in times.items()}, sizes)
        for measure in measures
        for library, times in torch_times(measure).items()
    }
    return table(map(readable, sizes), found)


def torch_times(measure: str) -> dict[str, dict[int, float]]:
    """Return the microseconds of both libraries by size."""
    return {
        name: {row["bytes"]: row[measure] for row in rows("torch", library=name) if measure in row}
        for name in ("ringcomm", "nccl")
    }


def bench_times(file: str, collective: str, most: int = 256 * MIB) -> dict[str, dict[int, float]]:
    return {
        name: {
            row["bytes"]: row["median"] * 1e6
            for row in rows(file, library=name, collective=collective, buffers="rotated")
            if row["bytes"] <= most
        }
        for name in ("ringcomm", "nccl")
    }


def of_bench(file: str) -> str:
    found: dict[str, dict[int, str]] = {}
    for collective in dict.fromkeys(row["collective"] for row in rows(file)):
        times = bench_times(file, collective)
        both = zip(times["ringcomm"], times["ringcomm"].values(), times["nccl"].values(), strict=True)
        found[collective] = {size: f"{short(ours)} / {short(nccl)}" for size, ours, nccl in both}
    sizes = sorted({size for each in found.values() for size in each})
    return table(map(readable, sizes), {name: cells(each, sizes) for name, each in found.items()})


def of_ring() -> tuple[list[str], dict[str, list[str]]]:
    found: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for row in rows("sweep", check="sweep", threads=512, slots=8, slot_KiB=512):
        found[f"{row['channels']} channels"][row["n"], row["MiB"]] = f"{row['of_copy']:.2f}"
    columns = [(n, size) for size in (16, 256) for n in (2, 4, 8)]
    named = [f"{size} MiB, n = {n}" for n, size in columns]
    return named, {name: [each.get(column, "") for column in columns] for name, each in found.items()}


def of_others() -> str:
    sizes = [4 * KIB, 64 * KIB, MIB, 64 * MIB]
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in [*rows("kernels", check="speed"), *rows("sweep", check="symspeed")]:
        if "collective" in row:
            name = f"{row['collective']}{', symmetric' if row['check'] == 'symspeed' else ''}"
            found[name][row["bytes"]].append(short(row["us"]))  # n = 2, then n = 8
    made = {name: {size: " / ".join(both) for size, both in each.items()} for name, each in found.items()}
    return table(map(readable, sizes), {name: cells(each, sizes) for name, each in made.items()})


def ratios(times: dict[str, dict[int, float]]) -> list[float]:
    """Return NCCL's time over ringcomm's at each size."""
    return [times["nccl"][size] / ours for size, ours in times["ringcomm"].items()]


def span(values: Iterable[float], digits: int = 1) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def cells(found: dict[int, str], sizes: list[int]) -> list[str]:
    return [found.get(size, "") for size in sizes]


PAGES: dict[Path, Callable[[], Iterator[str]]] = {
    HERE.parent / "README.md": of_readme,
    HERE.parent / "docs" / "gpu.md": of_gpu,
    HERE.parent / "docs" / "performance.md": of_performance,
}

if __name__ == "__main__":
    for path, make in PAGES.items():
        path.write_text(page(path.read_text(), joined(make())))
