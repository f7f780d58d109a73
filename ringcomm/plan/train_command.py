"""How to run a layout: its `Grid`, and the command of examples/train_gpt.py."""

from ringcomm.plan.model.layout import ParallelLayout
from ringcomm.plan.model.workload import Workload

__all__ = ["grid", "train_command"]

PLAIN = ParallelLayout()  # the defaults of the example


def grid(layout: ParallelLayout) -> str:
    """Return the `Grid` of a layout."""
    others = "".join(f", {name}={size}" for name in ("cp", "ep") if (size := getattr(layout, name)) > 1)
    return f"Grid(dp={layout.dp}, tp={layout.tp}, pp={layout.pp}{others})"


def train_command(workload: Workload, layout: ParallelLayout) -> str:
    """Return the command of examples/train_gpt.py that runs a layout."""
    model, device, batch = workload.model, workload.device, workload.batch
    least = -(-layout.gpus // device.node)
    nodes = next(count for count in range(least, layout.gpus + 1) if layout.gpus % count == 0)
    start = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else "--standalone"
    where = "--backend nccl --device cuda --precision bfloat16" if device.asynchronous else "--precision float32"
    names = ("dp", "tp", "pp", "cp", "ep", "schedule", "chunks", "recompute", "zero")
    chosen = [f"--{name} {getattr(layout, name)}" for name in names if getattr(layout, name) != getattr(PLAIN, name)]
    chosen += ["--sequence-parallel"] * layout.sequence_parallel
    sizes = f"--batch {batch} --context {model.seq} --layers {model.layers} --hidden {model.hidden}"
    sizes += f" --kv-heads {model.kv_heads}" * bool(model.kv_heads) + f" --ffn {model.ffn}" * bool(model.ffn)
    sizes += " --gated" * model.gated + f" --experts {model.experts} --top-k {model.top_k}" * bool(model.experts)
    return (
        f"torchrun {start} --nproc-per-node {layout.gpus // nodes} examples/train_gpt.py {where} {' '.join(chosen)} "
        f"--micro-batches {layout.micro_batches(batch)} {sizes} --heads {model.heads}"
    )
