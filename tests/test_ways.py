"""ringcomm algorithms: the table says what the core does, and follows the settings."""

import re

import pytest

from ringcomm import launch, memory, ways
from ringcomm.cli import main
from ringcomm.transports import shm


def taken(collective, memory, size=2, world="processes"):
    """Return {bytes: (way, chunks)}."""
    steps = launch(ways.walk, size, world=world)[0]
    mine = [step for step in steps if (step.collective, step.memory) == (collective, memory)]
    return {step.size: (step.way, step.chunks) for step in mine}


@pytest.mark.slow
def test_the_built_in_thresholds_show():
    found = taken("all_reduce", "private")
    assert {size for size, (way, _) in found.items() if way == "one shot"} == {4 << i for i in range(13)}, "to 16 KiB"
    assert {way for size, (way, _) in found.items() if size > 16 << 10} == {"two stages"}
    assert found[1 << 20] == ("two stages", 2), "chunks of 2 x 256 KiB"


@pytest.mark.slow
def test_the_settings_move_the_thresholds(monkeypatch):
    monkeypatch.setenv("RINGCOMM_SMALL_BYTES", "64")
    monkeypatch.setenv("RINGCOMM_DIRECT_BYTES", "1024")
    monkeypatch.setenv("RINGCOMM_SEGMENT_BYTES", "65536")
    found = taken("all_reduce", "private")
    assert (found[64][0], found[128][0]) == ("one shot", "two stages")
    assert found[1 << 20] == ("two stages", 8)
    found = taken("all_gather", "symmetric")
    assert (found[512][0], found[4096][0]) == ("exchange", "symmetric")


def test_threads_use_each_others_arrays():
    assert taken("broadcast", "private", world="threads")[1 << 20] == ("threads", 1)


def test_one_rank_is_alone():
    assert set(taken("all_reduce", "private", size=1, world="threads").values()) == {("alone", 1)}


def test_every_way_is_explained():
    assert set(ways.WAYS) == set(shm.WAYS)


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_way_and_explains_it(capsys):
    assert main(["algorithms", "-n", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^all_reduce +private +4 B +16 KiB +one shot$", text, re.MULTILINE)
    assert re.search(r"^all_reduce +private +32 KiB +64 MiB +two stages, in up to \d+ chunks$", text, re.MULTILINE)
    assert "(up to small_bytes = 16384)" in text
    assert "built-in thresholds" in text


def test_more_ranks_than_memory_bears_are_refused_in_a_line(capsys):
    assert main(["algorithms", "-n", "1000000"]) == 2
    assert re.fullmatch("ringcomm algorithms: 1000000 ranks needs .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(("room", "largest"), [(320, 64), (319, 32), (192, 32), (68, 1), (64, 1)])
def test_the_arrays_are_as_large_as_memory_bears(monkeypatch, room, largest):
    headroom = memory.Headroom(room << 20, "what the test leaves")
    monkeypatch.setattr(ways, "available", lambda: headroom)
    assert ways.affordable(1) == largest << 20


def test_the_table_ends_with_the_largest_array():
    steps = launch(ways.walk, 2, world="threads", args=(1 << 20,))[0]
    assert max(step.size for step in steps) == 1 << 20


def test_a_setting_that_makes_no_sense_is_refused_before_the_table(monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "x")
    assert main(["algorithms"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == "ringcomm algorithms: RINGCOMM_TIMEOUT: expected a number, got 'x'\n"


def test_a_number_of_ranks_that_makes_no_sense_is_refused(capsys):
    assert main(["algorithms", "-n", "0"]) == 2
    assert "ranks" in capsys.readouterr().err
