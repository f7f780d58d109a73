"""`ringcomm plan`: find the fastest layout of a GPT on a cluster, price one, or fit the constants of a device."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np

from ringcomm.errors import ArgumentError, refuse
from ringcomm.options import whole
from ringcomm.plan import calibrate, report
from ringcomm.plan.devices import Accelerator, Calibration, device, names, save
from ringcomm.plan.draw import draw
from ringcomm.plan.layout import RECOMPUTE, SCHEDULES, ZERO_STAGES, ParallelLayout
from ringcomm.plan.measure import measure
from ringcomm.plan.model import Transformer
from ringcomm.plan.search import price, search

__all__ = ["add_arguments", "run"]

NEEDED = ("gpus", "layers", "hidden", "heads", "batch")
ONE = ("tp", "pp", "dp", "micro_batch")  # given together, they name one layout; the rest has its default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = whole(1)
    add = parser.add_argument_group("model and cluster").add_argument
    add("--gpus", type=count, metavar="N", help="number of GPUs; with --measure, of ranks on this machine")
    add("--device", default="a100-80gb", metavar="NAME", help=f"{', '.join(names())} (default: a100-80gb)")
    add("--layers", type=count, metavar="N", help="transformer layers")
    add("--hidden", type=count, metavar="N", help="hidden size")
    add("--heads", type=count, metavar="N", help="attention heads")
    add("--kv-heads", type=count, metavar="N", help="heads of keys and values (default: as many)")
    add("--ffn", type=count, metavar="N", help="inner size of an MLP (default: 4 times the hidden size)")
    add("--vocab", type=count, default=51200, metavar="N", help="size of the vocabulary (default: 51200)")
    add("--seq", type=count, default=2048, metavar="N", help="sequence length (default: 2048)")
    add("--batch", type=count, metavar="N", help="sequences of a batch, of all replicas together")
    add("--attention", choices=("fused", "unfused"), help="whether scores stay on chip (default: as the device says)")
    text = f"what is given is fixed, the rest is searched; --{', --'.join(ONE).replace('_', '-')} name one layout"
    add = parser.add_argument_group("layout", text).add_argument
    add("--tp", type=count, metavar="N", help="ranks that share each layer (tensor parallelism)")
    add("--pp", type=count, metavar="N", help="pipeline stages")
    add("--dp", type=count, metavar="N", help="replicas (data parallelism)")
    add("--cp", type=count, metavar="N", help="ranks that share each sequence (context parallelism)")
    add("--micro-batch", type=count, metavar="N", help="sequences of a micro-batch")
    add("--chunks", type=count, metavar="N", help="stages of each rank; more than 1: interleaved 1F1B")
    add("--schedule", choices=SCHEDULES, help="of the pipeline; interleaved has more than one chunk")
    add("--recompute", choices=RECOMPUTE, help="activations that backward computes again")
    text = "shard norms and dropout over --tp, or do not"
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None, help=text)
    add("--zero", type=int, choices=ZERO_STAGES, help="stage of ZeRO")
    add = parser.add_argument_group("output").add_argument
    add("--best", type=count, default=10, metavar="N", help="layouts to show (default: 10)")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="PICTURE", help="draw the best layout: .png, .svg or .pdf; needs matplotlib")
    add = parser.add_argument_group("constants").add_argument
    add("--calibrate", type=Path, metavar="RUNS.csv", help="fit the constants of --device to measured steps")
    add("--save", metavar="NAME", help="keep the calibrated device under a name")
    add("--measure", action="store_true", help="measure the device this-N: --gpus N ranks on the CPU of this machine")


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure:
        return _measure(arguments)
    chosen = device(f"this-{arguments.gpus}" if arguments.device == "this" else arguments.device)
    if arguments.attention:
        chosen = replace(chosen, attention=arguments.attention)
    if arguments.calibrate:
        return _calibrate(arguments, chosen)
    if missing := [f"--{name}" for name in NEEDED if getattr(arguments, name) is None]:
        raise ArgumentError(f"the following options are required: {', '.join(missing)}")
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        raise refuse("--plot", "a file in a folder that exists", arguments.plot)
    model = Transformer(**{each.name: getattr(arguments, each.name) for each in fields(Transformer)})
    fixed = {each.name: getattr(arguments, each.name) for each in fields(ParallelLayout)}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    batch, result = arguments.batch, None
    if all(name in fixed for name in ONE):
        layout = ParallelLayout(**fixed)
        if arguments.schedule not in (None, layout.schedule):
            raise refuse("schedule", f"{layout.schedule}, with {layout.chunks} chunks", arguments.schedule)
        found = [price(model, chosen, arguments.gpus, batch, layout)]
    else:
        fixed |= {"schedule": arguments.schedule} if arguments.schedule else {}
        result = search(model, chosen, arguments.gpus, batch, fixed, arguments.best)
        found = result.best
    if arguments.json:
        print(json.dumps(report.as_json(found, model, chosen, batch, result), indent=2))
    elif result:
        print(*report.describe(result, model, chosen, batch), sep="\n")
    else:
        print(*report.details(found[0], model, chosen, batch), sep="\n")
    if arguments.plot:
        draw(found[0], model, chosen, batch, arguments.plot)
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.gpus is None:
        raise ArgumentError("--measure: expected --gpus, the number of ranks")
    measured = measure(arguments.gpus)
    path = save(measured, measured.name)
    print(
        f"{measured.name}: {measured.flops / 1e9:.1f} GFLOP/s and {measured.bandwidth / 1e9:.1f} GB/s of a rank, "
        f"{measured.calibration.launch * 1e6:.0f} µs to launch a layer, all_reduce {measured.inside / 1e9:.2f} GB/s "
        f"and {measured.inside_latency * 1e6:.1f} µs a step; in {path}"
    )
    return 0


def _calibrate(arguments: argparse.Namespace, chosen: Accelerator) -> int:
    recompute = arguments.recompute or "full"
    runs = calibrate.read_runs(
        arguments.calibrate,
        vocab=arguments.vocab,
        recompute=recompute,
        sequence_parallel=bool(arguments.sequence_parallel),
    )
    fitted = calibrate.fit(runs, chosen)
    print(*_fit_lines(runs, fitted), sep="\n")
    if arguments.save:
        path = save(replace(fitted, name=arguments.save), arguments.save)
        print(f"saved as --device {arguments.save} in {path}")
    return 0


def _fit_lines(runs: Sequence[calibrate.MeasuredRun], fitted: Accelerator) -> Iterator[str]:
    """Yield the runs with their errors, the constants, and the errors of runs that were not fitted."""
    errors = calibrate.errors(runs, fitted)
    yield "layers hidden  gpus  tp  pp   dp micro   measured  predicted"
    for (model, layout, gpus, _, seconds), error in zip(runs, errors, strict=True):
        yield (
            f"{model.layers:>6}{model.hidden:>7}{gpus:>6}{layout.tp:>4}{layout.pp:>4}{layout.dp:>5}"
            f"{layout.micro_batch:>6}{seconds:>9.3f} s{seconds * (1 + error):>9.3f} s{error:>+7.1%}"
        )
    yield ""
    for name, value in asdict(fitted.calibration).items():
        bound = getattr(calibrate.BOUNDS, name)
        yield f"{name:<8}{value:>10.3g}{' s' if name == 'launch' else '  '}{'  at its bound' * (value >= bound)}"
    yield f"fitted: mean error {np.abs(errors).mean():.1%}, worst {np.abs(errors).max():.1%}"
    if len(runs) >= 2 * len(fields(Calibration)):
        unseen = np.zeros(len(runs))
        for half in (0, 1):
            other = calibrate.fit(runs[half::2], fitted)
            unseen[1 - half :: 2] = calibrate.errors(runs[1 - half :: 2], other)
        yield (
            f"not fitted (every other run, by the rest): mean error {np.abs(unseen).mean():.1%}, "
            f"worst {np.abs(unseen).max():.1%}"
        )
