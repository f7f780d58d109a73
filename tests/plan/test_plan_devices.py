"""Devices: the built-in ones, and those of the user's own file."""

import pytest

from ringcomm import ArgumentError
from ringcomm.commands.cli import main
from ringcomm.plan.model.devices import Accelerator, device, names, own_devices, save


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("RINGCOMM_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_every_built_in_device_is_complete():
    assert names() == ["a100-80gb", "a100-40gb", "h100-80gb", "h200", "b200"]
    for name in names():
        found = device(name)
        assert isinstance(found, Accelerator)
        assert 0 < found.calibration.gemm <= 1
        assert (found.attention, found.dropout) == ("fused", False)
        assert bool(found.error) == (name in ("a100-80gb", "h100-80gb")), "the others were not measured"
    assert device("h200").memory / device("h100-80gb").memory == pytest.approx(131 / 80)
    assert device("a100-40gb").flops == device("a100-80gb").flops


def test_a_device_that_is_saved_is_found_again():
    first = device("h200")
    save(first, "mine")
    save(device("a100-80gb"), "other")
    assert {**vars(device("mine")), "name": ""} == {**vars(first), "name": ""}
    assert [*own_devices()["device"]] == ["mine", "other"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("flops = ", "[broken"), "devices.toml is damaged (Expected"),
        (("flops = ", "rate = "), "device mine: flops: expected a positive number, got nothing)"),
        (("node = 8", "node = 0"), "device mine: node: expected a positive number, got 0"),
        (("asynchronous = true", "asynchronous = 1"), "device mine: asynchronous: expected bool, got 1"),
        (("tile = [256, 128]", "tile = [256]"), "device mine: tile: expected two positive integers, got (256,)"),
        (("tile = [256, 128]", "tile = 256"), "device mine: "),
        (("gemm = 0.865", "gemm = nan"), "device mine: gemm: expected a positive number, got nan"),
        (("[calibration.mine]", "[calibration.other]"), "device mine: 'mine'"),
        (("[device.mine]", "[device]"), "expected tables [device.NAME] and [calibration.NAME] only"),
        (("[device.mine]", "device = 3\n[x]"), "expected tables [device.NAME] and [calibration.NAME] only"),
        (("a", "\xff"), "devices.toml is damaged ("),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence_by_what_needs_it(change, words, capsys):
    path = save(device("a100-80gb"), "mine")
    path.write_bytes(path.read_text().replace(*change).encode("latin-1"))
    with pytest.raises(ArgumentError) as raised:
        device("mine")
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"{path} is damaged (")
    assert str(raised.value).endswith("; mend or delete it")
    assert device("h200").name == "h200"
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "a100-80gb" in capsys.readouterr().out


def test_what_older_versions_have_written_is_ignored():
    path = save(device("a100-80gb"), "mine")
    path.write_text(
        path.read_text().replace("[device.mine]\n", '[device.mine]\ndropout = true\nattention = "unfused"\n')
    )
    assert device("mine").attention == "fused"
    path.write_text(path.read_text().replace("mine]", "h200]"))
    assert device("h200").flops > device("a100-80gb").flops
