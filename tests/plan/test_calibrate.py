"""Fits of a device's constants to measured steps."""

import re
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from published import TRITON, VTRAIN, llm_foundry, megatron, vtrain

from ringcomm import ArgumentError
from ringcomm.commands.cli import main
from ringcomm.plan.fit import BOUNDS, PRIOR, errors, fit, read_runs
from ringcomm.plan.model.devices import Calibration, device

DEFAULTS = {"vocab": 51200, "recompute": "full", "sequence_parallel": False}


def test_the_constants_of_the_a100_are_the_fit_to_all_runs():
    accelerator = megatron()
    fitted = fit(vtrain(), replace(accelerator, calibration=PRIOR))
    assert astuple(fitted.calibration) == pytest.approx(astuple(accelerator.calibration), rel=5e-3)
    assert fitted.calibration.inside == BOUNDS.inside
    assert round(fitted.error, 2) == accelerator.error
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert f"| every other run, by constants of the rest | {100 * fitted.error:.1f} % |" in text


def test_the_constants_of_the_h100_are_the_fit_to_all_runs():
    known = device("h100-80gb")
    runs = llm_foundry("h100-80gb")
    fitted = fit(runs, replace(known, fused=TRITON, calibration=PRIOR))
    assert astuple(fitted.calibration) == pytest.approx(astuple(known.calibration), rel=5e-3)
    assert fitted.calibration.launch == pytest.approx(PRIOR.launch), "no run depends on it"
    assert round(abs(errors(runs, known)).mean(), 2) == known.error, "their attention was slower"
    assert round(fitted.error, 3) == 0.026  # docs/plan.md
    assert f"{len(runs)} measured runs" in known.basis


def test_half_of_the_runs_predict_the_other():
    found = []
    for half in (0, 1):
        fitted = fit(vtrain()[half::2], megatron())
        found += list(abs(errors(vtrain()[1 - half :: 2], fitted)))
    assert sum(found) / len(found) < 0.08


def test_known_constants_are_found_again():
    known = Calibration(gemm=0.7, memory=0.6, launch=4e-3, inside=0.5, between=0.4)
    made = [run._replace(seconds=1.0) for run in vtrain()]
    seconds = 1 + errors(made, replace(megatron(), calibration=known))
    made = [run._replace(seconds=each) for run, each in zip(made, seconds, strict=True)]
    fitted = fit(made, megatron())
    assert astuple(fitted.calibration) == pytest.approx(astuple(known), rel=0.02)


def test_constants_that_no_run_depends_on_keep_their_prior_value():
    alone = [run for run in vtrain() if run.layout.tp == run.layout.pp == 1]
    fitted = fit(alone, megatron()).calibration
    assert fitted.inside == pytest.approx(PRIOR.inside, rel=1e-3)
    assert fitted.launch == pytest.approx(PRIOR.launch, rel=1e-3)


def test_the_command_prints_the_fit_and_keeps_it(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RINGCOMM_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with VTRAIN.open() as file:
        head, *rows = file.readlines()
    (tmp_path / "runs.csv").write_text("".join([head, *rows[:12]]))
    given = ["--calibrate", str(tmp_path / "runs.csv"), "--attention", "unfused", "--save", "mine"]
    assert main(["plan", *given]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" s ") >= 24
    assert "fitted: mean error" in printed
    assert "not fitted (every other run, by the rest): mean error" in printed
    assert "saved as --device mine in" in printed
    saved, mean = device("mine"), float(re.search(r"^not fitted .*: mean error ([\d.]+)%", printed, re.MULTILINE)[1])
    assert (saved.flops, saved.attention) == (megatron().flops, "fused"), "attention is that of the runs"
    assert saved.error == pytest.approx(mean / 100, abs=5e-4)
    assert saved.basis.endswith("fitted to 12 measured runs with unfused attention")
    (tmp_path / "runs.csv").write_text("".join([head, rows[0]]))
    assert main(["plan", *given]) == 0
    assert "too few runs to fit one half and predict the other: 10 are enough" in capsys.readouterr().out
    assert device("mine").error == 0
    assert device("mine").basis.endswith("fitted to 1 measured run with unfused attention")


def test_columns_for_other_fields_are_read(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,chunks,zero,recompute,sequence_parallel,vocab,kv_heads,"
        "ffn,gated,experts,top_k,ep,seconds\n8,16,1,64,4,8,32,2,2,2,2,1,none,1,99,2,128,1,4,3,2,0.5\n"
    )
    ((model, layout, gpus, batch, seconds),) = read_runs(path, **DEFAULTS)
    assert astuple(model) == (8, 64, 4, 99, 32, 2, 128, True, 4, 3)
    assert astuple(layout) == (2, 2, 2, 1, 1, 2, "none", True, 1, False, 2)
    assert (gpus, batch, seconds) == (8, 16, 0.5)


HEAD = "gpus,batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,seconds"
ROW = "8,16,1,64,4,8,32,2,2,2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "runs.csv: expected a header and a row for each run, got none"),
        (HEAD, "runs.csv: expected a header and a row for each run, got none"),
        (
            "gpus\n8\n",
            "line 1: columns: expected batch, seconds, layers, hidden, heads, seq, tp, pp, dp, micro_batch, got gpus",
        ),
        (HEAD.replace(",", ";"), "line 1: columns: expected gpus, batch, seconds, "),
        (f"{HEAD[:-8]}\n{ROW}\n", "line 1: columns: expected seconds, got"),
        (f"{HEAD},kv-heads\n{ROW},1,2\n", "line 1: columns: expected each once of batch, .*, got kv-heads"),
        (f"{HEAD},gpus\n{ROW},1,8\n", "line 1: columns: expected each once of batch, .*, got gpus"),
        (f"{HEAD}\n{ROW},1,2,3\n", "line 2: cells: expected 11, got 13"),
        *(
            (f"{HEAD}\n{ROW},1\n\n{ROW},{bad}\n", f"runs.csv, line 4: seconds: expected a positive number, got '{bad}'")
            for bad in ("x", "0", "-7.5", "nan", "inf")
        ),
        (f"{HEAD}\n{ROW}\n", "line 2: seconds: expected a positive number, got None"),
        (f"{HEAD}\n8.5{ROW[1:]},1\n", "line 2: gpus: expected a positive integer, got '8.5'"),
        (f"{HEAD},sequence_parallel\n{ROW},1,yes\n", "line 2: sequence_parallel: expected 0 or 1, got 'yes'"),
        (f"{HEAD},recompute\n{ROW},1,partial\n", "line 2: unknown recompute 'partial'"),
        (f"{HEAD}\n8,16,1,64,4,8,32,4,2,2,1\n", "line 2: gpus: expected tp 4"),
        (f"{HEAD}\n\0\xff", "runs.csv: expected a CSV file in UTF-8, got "),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text, words, tmp_path):
    (tmp_path / "runs.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match=words):
        read_runs(tmp_path / "runs.csv", **DEFAULTS)


def test_a_folder_is_refused_and_a_file_that_is_missing(tmp_path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none.csv", "No such file or directory")):
        with pytest.raises(ArgumentError, match=f"{path}: expected a CSV file in UTF-8, got {why}"):
            read_runs(path, **DEFAULTS)


def test_sequence_parallelism_by_default_is_that_of_the_runs_that_can_have_it(tmp_path):
    (tmp_path / "runs.csv").write_text(f"{HEAD}\n{ROW},1\n4,16,1,64,4,8,32,1,2,2,1\n")
    runs = read_runs(tmp_path / "runs.csv", **DEFAULTS | {"sequence_parallel": True})
    assert [run.layout.sequence_parallel for run in runs] == [True, False]
