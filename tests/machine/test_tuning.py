"""ringcomm tune: the thresholds that follow from timings, and the file that stores them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ringcomm
from ringcomm import ArgumentError, Config
from ringcomm.bench.tuning import command as tune
from ringcomm.commands.cli import main
from ringcomm.config import tuning_file
from ringcomm.machine import tuning


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "folder/tuning.json"
    monkeypatch.setenv("RINGCOMM_TUNING", str(path))
    tuning.read.cache_clear()
    return path


def test_tuned_settings_override_the_default_but_not_the_environment(file, monkeypatch):
    tuning.write(file, {"one_shot_bytes": 4096, "segment_bytes": 65536}, {"date": "today"})
    monkeypatch.setenv("RINGCOMM_SEGMENT_BYTES", "128")
    assert (Config().one_shot_bytes, Config().segment_bytes, Config().direct_bytes) == (4096, 128, 16384)
    assert Config(one_shot_bytes=1).one_shot_bytes == 1


def test_other_machines_keep_their_settings(file, monkeypatch):
    tuning.write(file, {"one_shot_bytes": 1}, {})
    monkeypatch.setattr(tuning, "machine_name", lambda: "another one")
    assert Config().one_shot_bytes == 16384
    tuning.write(file, {"one_shot_bytes": 2}, {})
    monkeypatch.undo()
    assert len(json.loads(file.read_text())) == 2


def test_an_empty_variable_means_no_file(monkeypatch):
    monkeypatch.setenv("RINGCOMM_TUNING", "")
    assert tuning_file() is None
    assert Config().one_shot_bytes == 16384


def test_by_default_the_file_is_in_the_users_config_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("RINGCOMM_TUNING")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuning_file() == tmp_path / "ringcomm/tuning.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_file() == tmp_path / ".config/ringcomm/tuning.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object with an entry per machine, got a list"),
        ("{MACHINE: 3}", 'expected the "settings" of a machine under'),
        ('{"one_shot_bytes": 4096}', "expected the \"settings\" of a machine under 'one_shot_bytes'"),
        ('{MACHINE: {"settings": {"one_shot_bytes": "many"}}}', "one_shot_bytes: expected an integer, got 'many'"),
        ('{MACHINE: {"settings": {"one_shot_bytes": Infinity}}}', "one_shot_bytes: expected an integer, got inf"),
        ("[" * 100_000, "its content is nested too deeply"),
        ("\0", "Expecting value"),
        ('{MACHINE: {"settings": {"one_shot_bites": 1}}}', "unknown setting 'one_shot_bites'; did you mean 'one_shot_"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_cure(file, content, reason):
    file.parent.mkdir()
    file.write_text(content.replace("MACHINE", json.dumps(tuning.machine_name())))
    with pytest.raises(
        ArgumentError, match=rf"tuning\.json cannot be read \(.*{reason}.*RINGCOMM_TUNING.*ringcomm tune"
    ):
        Config()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero"])
def test_what_is_no_regular_file_is_not_read(file, monkeypatch, kind):
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        monkeypatch.setenv("RINGCOMM_TUNING", kind)
    with pytest.raises(ArgumentError, match=r"(tuning\.json|/dev/zero) cannot be read \(it is no regular file\)"):
        Config()


def test_a_file_that_this_user_may_not_read_is_named(file, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied", str(file))

    tuning.write(file, {}, {})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ArgumentError, match=r"tuning\.json cannot be read \(Permission denied\); set RINGCOMM_TUNING"):
        Config()


@pytest.mark.parametrize("before", ['{"one_shot_bytes": 4096}', "[]", "{"])
def test_a_file_of_another_kind_is_rewritten(file, before):
    file.parent.mkdir()
    file.write_text(before)
    tuning.write(file, {"one_shot_bytes": 7}, {})
    assert Config().one_shot_bytes == 7


def test_a_file_that_is_named_but_missing_is_refused(file):
    with pytest.raises(ArgumentError, match=f"RINGCOMM_TUNING: expected .*, got {file}, which does not exist"):
        Config()


def test_an_invalid_threshold_is_refused_with_the_name_of_the_file(file):
    tuning.write(file, {"segment_bytes": 1}, {})
    with pytest.raises(ArgumentError, match=r"segment_bytes in .*tuning\.json: expected an integer from 64 .*, got 1"):
        Config()
    assert Config(segment_bytes=64).segment_bytes == 64


def test_all_tuned_settings_are_read():
    assert {setting.name for setting in tune.SETTINGS} == set(tuning.TUNABLE)


def test_copies_by_the_kernel_are_left_to_the_built_in_rule_where_they_pay_at_no_size():
    [setting] = [setting for setting in tune.SETTINGS if setting.name == "cma_bytes"]
    assert setting.choose([1, 2], {1: [5, 5], tuning.NEVER: [1, 1]}) is None
    assert setting.choose([1, 2], {1: [5, 5], tuning.NEVER: [1, 9]}) == 2
    assert tune.describe_threshold(None) == "as built in"


SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("small", "large", "last", "first"),
    [
        ([1, 1, 9, 9], [5, 5, 5, 5], 2, 4),
        ([1, 1, 1, 1], [5, 5, 5, 5], 8, tuning.NEVER),
        ([9, 9, 9, 9], [5, 5, 5, 5], 0, 1),
        ([1, 6, 1, 9], [5, 5, 5, 5], 4, 8),  # one noisy size does not decide
    ],
)
def test_a_threshold_minimizes_the_total_time(small, large, last, first):
    times = {0: large, tuning.NEVER: small}
    assert tune.up_to(SIZES, times) == last
    assert tune.starting_from(SIZES, times) == first


def test_the_fastest_value_minimizes_the_total_over_all_sizes():
    assert tune.fastest(SIZES, {64: [1, 10, 10, 10], 128: [2, 2, 2, 2], 256: [3, 3, 3, 3]}) == 128


# `ringcomm tune` of two values at two sizes.
TUNE_SOON = """
import sys
from dataclasses import replace
from ringcomm.bench.tuning import command as tune
from ringcomm.commands.cli import main
tune.SETTINGS = [replace(each, values=each.values[:2], end=2 * each.begin) for each in tune.SETTINGS]
sys.exit(main(["tune", "-n", "3"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)  # on a busy machine
def test_the_command_writes_what_init_reads(file):
    run = subprocess.run([sys.executable, "-c", TUNE_SOON], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    written = json.loads(file.read_text())[tuning.machine_name()]
    # Without cma_bytes where copies by the kernel were faster at neither size.
    assert set(tuning.TUNABLE) - {"cma_bytes"} <= set(written["settings"]) <= set(tuning.TUNABLE)
    assert written["ringcomm"] == ringcomm.__version__
    config = Config()
    assert {name: getattr(config, name) for name in written["settings"]} == written["settings"]
    assert all(f"{name} = " in run.stdout for name in tuning.TUNABLE)


def test_too_few_rounds_are_refused(file, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "-n", "2"])
    assert "expected an integer from 3 on, got '2'" in capsys.readouterr().err
    assert not file.exists()


def test_without_a_tuning_file_the_command_fails(monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_TUNING", "")
    assert main(["tune"]) == 2
    assert "RINGCOMM_TUNING is empty" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_TUNING", str(tmp_path))
    assert main(["tune"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert f"Is a directory: '{tmp_path}'" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_tune_changes_nothing(file, tmp_path, number):
    folder = tmp_path / ("scratch" * 16)  # longer than a socket path may be
    folder.mkdir()
    command = [sys.executable, "-m", "ringcomm", "tune", "-n", "1000"]
    with subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would be ignored
    ) as process:
        while not list(folder.glob("ringcomm-bench-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert err.decode() == f"ringcomm tune: interrupted: {file} stays as it was\n"
    assert not list(folder.iterdir())
    assert not file.exists()
