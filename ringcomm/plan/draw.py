"""`ringcomm plan --plot`: a step of a layout, with a row for each stage, and the memory of each stage beside it."""

from pathlib import Path

from ringcomm.algorithms.draw import GRAY, INK, PALE, save, sheet
from ringcomm.pipelining import FORWARD
from ringcomm.plan.model.devices import GIB, Accelerator
from ringcomm.plan.price.candidate import Candidate
from ringcomm.plan.price.memory import MemoryUse, memory_use
from ringcomm.plan.price.step import Pricing
from ringcomm.plan.train_command import grid

__all__ = ["draw"]

SHADES = {"forward": "tab:blue", "backward": "tab:green", "dp": "tab:red", "optimizer": "tab:purple"}
KINDS = ("tab:blue", "tab:cyan", "tab:pink", "tab:purple", "tab:green", "tab:olive")  # of memory
WIDE, MEMORY_WIDE, ROW = 12, 4, 0.4  # inches


def draw(candidate: Candidate, output: Path) -> None:
    """Draw a layout."""
    workload, layout, cost, _ = candidate
    model, device, batch = workload.model, workload.device, workload.batch
    timeline = Pricing(workload).timeline(layout, cost)
    title = f"{cost.seconds:.3f} s a step on {layout.gpus} × {device.name}; stages idle {timeline.bubble:.1%}"
    legend = "blue: forward; green: backward; red: gradients; purple: optimizer; gray: idle"
    figure, axes = sheet(WIDE, ROW * layout.pp, grid(layout), title, legend)
    axes.set(xlim=(0, cost.seconds), ylim=(layout.pp, 0))
    for rank, row in enumerate(timeline.spans):
        axes.text(-0.005 * cost.seconds, rank + 0.5, f"stage {rank}", color=INK, ha="right", va="center", fontsize=8)
        axes.broken_barh([(0, cost.seconds)], (rank + 0.1, 0.8), color=PALE)
        for phase in ("forward", "backward"):
            spans = [
                (at.begin, at.end - at.begin) for at in row if (at.action.phase == FORWARD) is (phase == "forward")
            ]
            axes.broken_barh(spans, (rank + 0.1, 0.8), facecolor=SHADES[phase], edgecolor="white", linewidth=0.2)
        begin = timeline.makespan
        for part, seconds in (("dp", cost.parts.dp), ("optimizer", cost.parts.optimizer)):
            axes.broken_barh([(begin, seconds)], (rank + 0.1, 0.8), facecolor=SHADES[part])
            begin += seconds
    _draw_memory(figure, [memory_use(model, layout, device, batch, rank) for rank in range(layout.pp)], device)
    save(figure, output)


def _draw_memory(figure: object, uses: list[MemoryUse], device: Accelerator) -> None:
    axes = figure.add_axes((1.04, 0, MEMORY_WIDE / WIDE, 1))  # type: ignore[attr-defined]  # matplotlib is optional
    axes.set(xlim=(0, max(device.memory, *(use.total for use in uses)) / GIB), ylim=(len(uses), 0), yticks=[])
    axes.set_xlabel("GiB of a rank", color=GRAY)
    begins = [0.0] * len(uses)
    for kind, color in zip(MemoryUse._fields, KINDS, strict=True):
        sizes = [getattr(use, kind) / GIB for use in uses]
        axes.barh([rank + 0.5 for rank in range(len(uses))], sizes, 0.8, begins, color=color, label=kind)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    axes.axvline(device.available / GIB, color=INK, linewidth=1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
