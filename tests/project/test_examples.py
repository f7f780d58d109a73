"""The programs in examples/ run and give the documented results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from ringcomm.bench.machine import gpus

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(backend, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--backend", backend, "--steps", "40", "--batch", "4", "--width", "64", *options]
    for _ in range(3):
        run = subprocess.run(
            [*command, str(EXAMPLES / "ddp_text.py"), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=2 * harness.OPERATION,
        )
        if backend == "ringcomm" or "terminate called" not in run.stderr:
            break  # otherwise a thread of Gloo has destroyed its own group, which ends the process now and then
    assert run.returncode == 0, run.stderr
    assert f"2 ranks on {backend}" in run.stdout
    found = re.findall(r"^step (\d+): loss ([\d.]+), [\d,]+ tokens/s$", run.stdout, re.MULTILINE)
    assert [step for step, _ in found] == ["20", "40"]
    return [float(loss) for _, loss in found]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_transformer_trained_on_text_reaches_the_same_loss_on_both_backends():
    ours, theirs = losses("ringcomm"), losses("gloo")
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours[1] < ours[0] < 4.6  # it learns: log(103) is 4.63


def gpt(*options, ranks=4):
    """Return the losses that the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    small = ["--steps", "20", "--hidden", "32", "--batch", "8", "--context", "32", "--micro-batches", "2"]
    run = subprocess.run(
        [*(command if ranks > 1 else [sys.executable]), str(EXAMPLES / "train_gpt.py"), *small, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3 * harness.OPERATION,
    )
    assert run.returncode == 0, run.stderr
    found = re.findall(r"^step (\d+)/\d+: loss ([\d.]+), [\d,]+ tokens/s$", run.stdout, re.MULTILINE)
    assert found
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_gpt_on_four_processes_has_the_losses_of_one_also_after_a_checkpoint(tmp_path):
    alone = gpt("--plot", str(tmp_path / "loss.png"), ranks=1)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [*alone] == [*range(2, 21, 2)]
    assert alone[20] < alone[2] < 4.6  # it learns: log(103) is 4.63
    folder = str(tmp_path / "checkpoint")
    begun = gpt("--dp", "2", "--tp", "2", "--zero", "1", "--steps", "10", "--save", folder)
    assert {step: begun[step] for step in range(2, 11, 2)} == pytest.approx(up_to(10, alone), abs=2e-4)
    other = ["--tp", "2", "--pp", "2", "--schedule", "interleaved", "--chunks", "2", "--sequence-parallel"]
    rest = gpt(*other, "--backend", "gloo", "--resume", folder)
    assert up_to(10, alone) | rest == pytest.approx(alone, abs=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="no CUDA device")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("grid", ["--dp 2", "--dp 2 --zero 1", "--tp 2 --sequence-parallel", "--pp 2"])
def test_a_gpt_on_gpus_has_the_losses_of_a_cpu(grid):
    assert gpt("--device", "cuda", *grid.split(), ranks=2) == pytest.approx(gpt(ranks=1), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="no CUDA device")
@pytest.mark.timeout(180)
def test_a_transformer_trained_on_gpus_has_the_losses_of_cpus():
    assert losses("ringcomm", "--device", "cuda") == pytest.approx(losses("ringcomm"), rel=1e-3)


def up_to(last, losses):
    return {step: loss for step, loss in losses.items() if step <= last}


@pytest.mark.slow
def test_the_sum_of_arrays_on_gpus_is_correct_on_the_emulated_device():
    command = [sys.executable, "-m", "ringcomm", "run", "-n", "2", EXAMPLES / "gpu_allreduce.py", "--emulated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=harness.OPERATION)
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"(\d) of 2 on the emulated device$", run.stdout, re.MULTILINE)) == ["1", "2"]
    assert re.search(r"all_reduce of 65,536 bytes: [\d.,]+ us, bus bandwidth [\d.e-]+ GB/s$", run.stdout, re.MULTILINE)
