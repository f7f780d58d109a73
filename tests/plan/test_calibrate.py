"""Fits of a device's constants to measured steps."""

import csv
from dataclasses import astuple, replace

import numpy as np
import pytest
from published import A100, VTRAIN, vtrain, vtrain_errors

from ringcomm import ArgumentError
from ringcomm.commands.cli import main
from ringcomm.plan import calibrate
from ringcomm.plan.calibrate import BOUNDS, PRIOR, errors, fit, read_runs
from ringcomm.plan.devices import Calibration, device

DEFAULTS = {"vocab": 51200, "recompute": "full", "sequence_parallel": False}


def test_the_constants_of_the_a100_are_the_fit_to_all_runs():
    accelerator = device(A100)
    fitted = fit(vtrain(), replace(accelerator, calibration=PRIOR)).calibration
    assert astuple(fitted) == pytest.approx(astuple(accelerator.calibration), rel=5e-3)
    assert fitted.inside == BOUNDS.inside


def test_half_of_the_runs_predict_the_other():
    found = []
    for half in (0, 1):
        fitted = fit(vtrain()[half::2], device(A100))
        found += list(abs(errors(vtrain()[1 - half :: 2], fitted)))
    assert sum(found) / len(found) < 0.08


@pytest.mark.exhaustive
def test_three_models_predict_the_fourth():
    found = []
    for model in {run.model for run in vtrain()}:
        seen = [run for run in vtrain() if run.model != model]
        found += list(abs(errors([run for run in vtrain() if run.model == model], fit(seen, device(A100)))))
    assert sum(found) / len(found) < 0.08


def test_known_constants_are_found_again():
    known = Calibration(gemm=0.7, memory=0.6, launch=4e-3, inside=0.5, between=0.4)
    made = [run._replace(seconds=1.0) for run in vtrain()]
    seconds = 1 + errors(made, replace(device(A100), calibration=known))
    made = [run._replace(seconds=each) for run, each in zip(made, seconds, strict=True)]
    fitted = fit(made, device(A100))
    assert astuple(fitted.calibration) == pytest.approx(astuple(known), rel=0.02)


def test_no_constants_near_the_fit_are_likelier(monkeypatch):
    runs, accelerator = vtrain()[:8], device(A100)
    best = np.log(astuple(fit(runs, accelerator).calibration))
    monkeypatch.setattr(calibrate, "STEPS", 0)  # only the cost of where it starts
    cost, _ = calibrate._descend(runs, accelerator, best)
    for near in (best + step for unit in np.eye(len(best)) for step in (0.03 * unit, -0.03 * unit)):
        if (near <= np.log(astuple(BOUNDS))).all():
            assert calibrate._descend(runs, accelerator, near)[0] > cost


def test_constants_that_no_run_depends_on_keep_their_prior_value():
    alone = [run for run in vtrain() if run.layout.tp == run.layout.pp == 1]
    fitted = fit(alone, device(A100)).calibration
    assert fitted.inside == pytest.approx(PRIOR.inside, rel=1e-3)
    assert fitted.launch == pytest.approx(PRIOR.launch, rel=1e-3)


def test_the_command_prints_the_fit_and_keeps_it(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RINGCOMM_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with VTRAIN.open() as file:
        head, *rows = file.readlines()
    (tmp_path / "runs.csv").write_text("".join([head, *rows[:12]]))
    assert main(["plan", "--calibrate", str(tmp_path / "runs.csv"), "--save", "mine"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" s ") >= 24
    assert "fitted: mean error" in printed
    assert "not fitted (every other run, by the rest): mean error" in printed
    assert "saved as --device mine in" in printed
    assert device("mine").flops == device(A100).flops


def test_short_names_of_columns_and_more_columns_are_read(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,chunks,zero,recompute,sequence_parallel,vocab,kv_heads,"
        "ffn,seconds\n8,16,1,64,4,8,32,2,2,2,2,1,none,1,99,2,128,0.5\n"
    )
    ((model, layout, gpus, batch, seconds),) = read_runs(path, **DEFAULTS)
    assert astuple(model) == (8, 64, 4, 99, 32, 2, 128)
    assert astuple(layout) == (2, 2, 2, 1, 1, 2, "none", True, 1)
    assert (gpus, batch, seconds) == (8, 16, 0.5)


def test_the_file_of_vtrain_is_read_as_it_is():
    with VTRAIN.open() as file:
        first = next(csv.DictReader(file))
    run = vtrain()[0]
    assert run.seconds == float(first["iteration time (ms)"]) / 1e3
    assert (run.gpus, run.batch, run.layout.micro_batch) == (64, 512, 8)
    assert len(vtrain_errors()) == 55


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "runs.csv: expected a header and a row for each run, got none"),
        ("gpus\n8\n", "runs.csv, line 2: columns: expected 'batch' or 'global batch', got gpus"),
        (
            "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp\n8,16,1,64,4,8,32,2,2,2\n",
            r"line 2: columns: expected seconds or iteration time \(ms\)",
        ),
        (
            "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,seconds\n8,16,1,64,4,8,32,2,2,2,x\n",
            "line 2: could not convert string to float: 'x'",
        ),
        (
            "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,seconds\n8,16,1,64,4,8,32,4,2,2,1\n",
            "line 2: gpus: expected tp 4",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text, words, tmp_path):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(ArgumentError, match=words):
        read_runs(tmp_path / "runs.csv", **DEFAULTS)
