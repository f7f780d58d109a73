"""The values of options, and what is said of a wrong one."""

import sys
from argparse import ArgumentTypeError

import pytest

from ringcomm import options
from ringcomm.commands.cli import main


@pytest.mark.parametrize(
    ("text", "size", "written"),
    [("4", 4, "4 B"), ("64K", 65536, "64 KiB"), ("3m", 3 << 20, "3 MiB"), ("1G", 1 << 30, "1 GiB")],
)
def test_sizes_are_read_and_written_with_units(text, size, written):
    assert options.parse_bytes(text) == size
    assert options.readable(size) == written


def test_several_values_are_read_once_each():
    assert options.several(options.whole(1))("2, 8,2") == [2, 8]


@pytest.mark.parametrize(
    ("parse", "wrong", "expected"),
    [
        (options.integer, ("x", "", "1.5"), "an integer, got"),
        (options.whole(2), ("1", "-3", "x"), "an integer(?: from 2 on)?, got"),
        (options.positive, ("0", "-1", "nan", "inf", "x"), "a positive number, got"),
        (options.parse_bytes, ("0", "4X", "K", "-1", "", "1.5M"), "a size such as 4, 64K, 16M or 1G, got"),
    ],
)
def test_a_wrong_value_is_answered_by_what_was_expected_and_given(parse, wrong, expected):
    for text in wrong:
        with pytest.raises(ArgumentTypeError, match=f"^expected {expected} {text!r}$"):
            parse(text)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ArgumentTypeError, match=r"unknown peer 'gloom'; did you mean 'gloo'\?"):
        options.one_of("peer", ["gloo", "mpich"])("gloom")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "expected a .png, .svg or .pdf, got 'x'"),
        ("x.bmp", "expected a .png, .svg or .pdf, got 'x.bmp'"),
        ("", "expected a .png, .svg or .pdf, got ''"),
        ("missing/x.png", "expected a file that can be written, got 'missing/x.png': No such file or directory"),
        ("folder.pdf", "expected a file that can be written, got 'folder.pdf': Is a directory"),
    ],
)
@pytest.mark.parametrize("command", ["draw ring -o", "plot some.json -o", "plan --plot", "trace folder.pdf --plot"])
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(command, text, words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pdf").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), text])
    assert capsys.readouterr().err.endswith(f": {words}\n")
    assert [*tmp_path.iterdir()] == [tmp_path / "folder.pdf"]


def test_a_missing_matplotlib_has_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentTypeError, match=r"^needs matplotlib: pip install 'ringcomm\[bench\]'$"):
        options.picture("x.png")
