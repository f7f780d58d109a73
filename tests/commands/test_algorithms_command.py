"""`ringcomm algorithms`: the paths that the native code takes, and how the settings move them."""

import re

import pytest

from ringcomm import launch
from ringcomm.commands import algorithms
from ringcomm.commands.cli import main
from ringcomm.machine import memory
from ringcomm.types import PATHS


def taken(collective, memory, size=2, world="processes", largest=1 << 20):
    """Return {bytes: (path, chunks)}."""
    calls = launch(algorithms.call_all, size, world=world, args=(largest,))[0]
    mine = [call for call in calls if (call.collective, call.memory) == (collective, memory)]
    return {call.size: (call.path, call.chunks) for call in mine}


@pytest.mark.slow
def test_the_built_in_thresholds_show():
    found = taken("all_reduce", "private", largest=2 << 20)
    assert {size for size, (path, _) in found.items() if path == "one-shot"} == {4 << i for i in range(13)}, "to 16 KiB"
    assert {path for size, (path, _) in found.items() if size > 16 << 10} == {"two-stage"}
    assert found[2 << 20] == ("two-stage", 2), "chunks of 2 x 512 KiB"


@pytest.mark.slow
def test_the_settings_move_the_thresholds(monkeypatch):
    monkeypatch.setenv("RINGCOMM_ONE_SHOT_BYTES", "64")
    monkeypatch.setenv("RINGCOMM_DIRECT_BYTES", "1024")
    monkeypatch.setenv("RINGCOMM_SEGMENT_BYTES", "65536")
    found = taken("all_reduce", "private")
    assert (found[64][0], found[128][0]) == ("one-shot", "two-stage")
    assert found[1 << 20] == ("two-stage", 8)
    found = taken("all_gather", "symmetric")
    assert (found[512][0], found[4096][0]) == ("staged", "symmetric")


def test_threads_access_each_others_arrays():
    found = taken("broadcast", "private", world="threads")
    assert found[1 << 20] == ("threads", 1)
    assert max(found) == 1 << 20, "the largest array asked for"


def test_one_rank_takes_the_single_path():
    assert set(taken("all_reduce", "private", 1, "threads").values()) == {("single", 1)}


def test_every_path_is_explained():
    assert set(algorithms.PATHS) == {*PATHS} - {"program"}  # which is between hosts


@pytest.mark.slow
def test_the_command_prints_each_range_of_sizes_and_explains_its_path(capsys):
    assert main(["algorithms", "-n", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^all_reduce +private +4 B +16 KiB +one-shot$", text, re.MULTILINE)
    assert re.search(r"^all_reduce +private +32 KiB +64 MiB +two-stage, in up to \d+ chunks$", text, re.MULTILINE)
    assert "up to one_shot_bytes = 16384." in text
    assert "built-in thresholds" in text


def test_more_ranks_than_fit_into_memory_are_refused(capsys):
    assert main(["algorithms", "-n", "1000000"]) == 2
    text = r"ringcomm algorithms: --ranks: expected at most \d+, as this runs them, .* are available .*, got 1000000\n"
    assert re.fullmatch(text, capsys.readouterr().err)


@pytest.mark.parametrize(("room", "largest"), [(320, 64), (319, 32), (192, 32), (68, 1), (64, 1)])
def test_the_largest_arrays_fit_into_memory(monkeypatch, room, largest):
    headroom = memory.Headroom(room << 20, "the test")
    monkeypatch.setattr(algorithms, "available", lambda: headroom)
    assert algorithms.affordable(1) == largest << 20


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("TIMEOUT", "x", "RINGCOMM_TIMEOUT: expected a finite number of seconds > 0, got 'x'"),
        ("ALGORITHM", "rink", "unknown algorithm 'rink'; did you mean 'ring'?"),  # which a rank refuses
    ],
)
def test_an_invalid_setting_is_refused_before_the_table(monkeypatch, capsys, name, value, refusal):
    monkeypatch.setenv(f"RINGCOMM_{name}", value)
    assert main(["algorithms"]) == 2
    assert capsys.readouterr() == ("", f"ringcomm algorithms: {refusal}\n")
