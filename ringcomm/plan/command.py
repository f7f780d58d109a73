"""`ringcomm plan`: find the fastest layout of a GPT on a cluster, price one, or fit the constants of a device."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ringcomm.errors import ArgumentError, refuse
from ringcomm.options import picture, whole
from ringcomm.plan import fit as calibrate
from ringcomm.plan import report
from ringcomm.plan.draw import draw
from ringcomm.plan.measure import measure
from ringcomm.plan.model.devices import Accelerator, check_name, device, names, own_devices, ranks_of, save
from ringcomm.plan.model.layout import RECOMPUTE, SCHEDULES, ZERO_STAGES, ParallelLayout, with_schedule
from ringcomm.plan.model.transformer import Transformer
from ringcomm.plan.model.workload import Workload
from ringcomm.plan.price.candidate import price
from ringcomm.plan.report_json import as_json
from ringcomm.plan.search.search import search

__all__ = ["add_arguments", "run"]

NEEDED = ("gpus", "layers", "hidden", "heads", "batch")
ONE = ("tp", "pp", "dp", "micro_batch")  # given together, they name one layout; the rest has its default
DEFAULTS = {"device": "a100-80gb", "vocab": 51200, "seq": 2048, "gated": False, "experts": 0, "top_k": 2, "best": 10}
# The options that go with one of these; with neither, all others do.
MODES = {
    "measure": ("gpus",),
    "calibrate": ("device", "attention", "vocab", "recompute", "sequence_parallel", "save"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"ringcomm plan {' '.join(f'--{name} N' for name in NEEDED)} [option ...]"
    count = whole(1)
    add = parser.add_argument_group("model and cluster").add_argument
    add("--gpus", type=count, metavar="N", help="number of GPUs; with --measure, of ranks on this machine")
    text = f"{', '.join(names())}, this (see --measure) or your own (see --save); default: {DEFAULTS['device']}"
    add("--device", metavar="NAME", help=text)
    add("--layers", type=count, metavar="N", help="transformer layers")
    add("--hidden", type=count, metavar="N", help="hidden size")
    add("--heads", type=count, metavar="N", help="attention heads")
    add("--kv-heads", type=count, metavar="N", help="heads of keys and values (default: as many)")
    add("--ffn", type=count, metavar="N", help="inner size of an MLP (default: 4 times the hidden size)")
    add("--gated", action="store_true", default=None, help="MLPs have a third matrix, as those of Llama")
    add("--experts", type=count, metavar="N", help="experts in each layer, in place of an MLP")
    add("--top-k", type=count, metavar="K", help="experts for each token (default: 2)")
    add("--vocab", type=count, metavar="N", help="size of the vocabulary (default: 51200)")
    add("--seq", type=count, metavar="N", help="sequence length (default: 2048)")
    add("--batch", type=count, metavar="N", help="sequences of a batch, of all replicas together")
    text = "unfused: scores are stored, with dropout, as in Megatron-LM of 2022 (default: fused, without dropout)"
    add("--attention", choices=("fused", "unfused"), help=text)
    text = f"what is given is fixed, the rest is searched; --{', --'.join(ONE).replace('_', '-')} name one layout"
    add = parser.add_argument_group("layout", text).add_argument
    add("--tp", type=count, metavar="N", help="ranks that share each layer (tensor parallelism)")
    add("--pp", type=count, metavar="N", help="pipeline stages")
    add("--dp", type=count, metavar="N", help="replicas (data parallelism)")
    add("--cp", type=count, metavar="N", help="ranks that share each sequence (context parallelism)")
    add("--ep", type=count, metavar="N", help="replicas that divide the experts of each layer among them")
    add("--micro-batch", type=count, metavar="N", help="sequences of a micro-batch")
    add("--chunks", type=count, metavar="N", help="stages of each rank (interleaved 1F1B, zbv)")
    text = "of the pipeline: interleaved has several chunks, zbv has 2; zb-h1 and zbv are tried on request only"
    add("--schedule", choices=SCHEDULES.values(), help=text)
    add("--recompute", choices=RECOMPUTE, help="activations that backward computes again")
    text = "shard norms and dropout over --tp, or do not"
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None, help=text)
    add("--zero", type=int, choices=ZERO_STAGES, help="stage of ZeRO")
    add = parser.add_argument_group("output").add_argument
    add("--best", type=count, metavar="N", help="layouts to show (default: 10)")
    add("--json", action="store_true", default=None, help="print JSON")
    add("--plot", type=picture, metavar="PICTURE", help="draw the best layout: .png, .svg or .pdf; needs matplotlib")
    add = parser.add_argument_group("constants").add_argument
    add("--calibrate", type=Path, metavar="RUNS.csv", help="fit the constants of --device to measured steps")
    add("--save", metavar="NAME", help="keep the calibrated device under a name")
    text = "measure the device this-N: --gpus N ranks on the CPU of this machine"
    add("--measure", action="store_true", default=None, help=text)


def run(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None and name != "run"}
    try:
        _check_mode(given)
        chosen = argparse.Namespace(**vars(arguments) | DEFAULTS | given)
        if arguments.measure:
            return _measure(chosen)
        return _calibrate(chosen) if arguments.calibrate else _plan(chosen)
    except ArgumentError as error:
        name, space, value = (error.argument or "").partition(" ")
        if name not in vars(arguments):
            raise
        raise refuse(_option(name) + space + value, error.expected, error.got) from None


def _check_mode(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if an option would be ignored."""
    if mode := next((each for each in MODES if each in given), None):
        if ignored := [_option(name) for name in given if name not in (mode, *MODES[mode])]:
            raise refuse(_option(mode), f"only {', '.join(map(_option, MODES[mode]))} beside it", ", ".join(ignored))
    elif "save" in given:
        raise ArgumentError("--save: expected with --calibrate, which fits the device that is saved")
    elif "best" in given and all(name in given for name in ONE):
        raise refuse("best", "a search", f"one layout, by {', '.join(map(_option, ONE))}")
    elif "experts" not in given and (name := next((each for each in ("top_k", "ep") if each in given), None)):
        raise refuse(name, "--experts beside it", given[name])


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plan(arguments: argparse.Namespace) -> int:
    if missing := [f"--{name}" for name in NEEDED if getattr(arguments, name) is None]:
        raise ArgumentError(f"the following options are required: {', '.join(missing)}")
    model = Transformer(**{each.name: getattr(arguments, each.name) for each in fields(Transformer)})
    workload = Workload(model, _device(arguments), arguments.gpus, arguments.batch)
    given = {name: getattr(arguments, name, None) for name in (*asdict(ParallelLayout()), "schedule")}
    fixed = {name: value for name, value in given.items() if value is not None}
    result = None if all(name in fixed for name in ONE) else search(workload, fixed, arguments.best)
    found = result.best if result else [price(workload, with_schedule(**fixed))]
    if arguments.json:
        print(json.dumps(as_json(found, result), indent=2))
    else:
        print(*(report.describe(result) if result else report.details(found[0])), sep="\n")
    if arguments.plot:
        draw(found[0], arguments.plot)
    return 0


def _device(arguments: argparse.Namespace) -> Accelerator:
    """Return the device; `this-N` for N ranks only, whose collectives were measured."""
    name, gpus = arguments.device, arguments.gpus
    if gpus and ranks_of(name) not in (None, f"{gpus}"):
        raise refuse("gpus", f"{ranks_of(name)}, as {name} was measured", gpus)
    chosen = device(f"this-{gpus}" if name == "this" else name)
    return replace(chosen, attention=arguments.attention) if arguments.attention else chosen


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.gpus is None:
        raise ArgumentError("--measure: expected --gpus, the number of ranks")
    own_devices()  # raises now, not after the measurement
    measured = measure(arguments.gpus)
    path = save(measured, measured.name)
    print(
        f"{measured.name}: {measured.flops / 1e9:.1f} GFLOP/s and {measured.bandwidth / 1e9:.1f} GB/s of a rank, "
        f"{measured.calibration.launch * 1e6:.0f} µs to launch a layer, all_reduce {measured.inside / 1e9:.2f} GB/s "
        f"and {measured.inside_latency * 1e6:.1f} µs a step; in {path}"
    )
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if arguments.device == "this":
        raise refuse("device", "this-N, as --measure has named it", "this")
    if arguments.save is not None:
        check_name(arguments.save)
        own_devices()
    defaults = {"vocab": arguments.vocab, "recompute": arguments.recompute or "full"}
    sharded = bool(arguments.sequence_parallel)
    runs = calibrate.read_runs(arguments.calibrate, **defaults, sequence_parallel=sharded)
    fitted = calibrate.fit(runs, _device(arguments))
    print(*calibrate.describe(runs, fitted), sep="\n")
    if arguments.save:
        print(f"saved as --device {arguments.save} in {save(fitted, arguments.save)}")
    return 0
