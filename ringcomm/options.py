"""Parsers for the values of options, which say what was expected and given; and sizes as text."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from itertools import count, takewhile
from math import inf
from pathlib import Path
from typing import TypeVar

from ringcomm.errors import ArgumentError, unknown
from ringcomm.machine.files import check_writable

__all__ = [
    *("integer", "module", "not_negative", "one_of", "output", "parse_bytes", "picture"),
    *("positive", "readable", "several", "sizes", "whole"),
]

T = TypeVar("T")

UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected an integer, got {text!r}") from None


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers from `least` on."""

    def parse(text: str) -> int:
        if integer(text) < least:
            raise ArgumentTypeError(f"expected an integer from {least} on, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < inf:
            return float(text)
    raise ArgumentTypeError(f"expected a positive number, got {text!r}")


def not_negative(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < inf:
            return float(text)
    raise ArgumentTypeError(f"expected a number from 0 on, got {text!r}")


def module(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ArgumentTypeError(f"expected the name of a module, got {text!r}")
    return text


def output(text: str) -> Path:
    """Parse the name of a file to write; nothing is written yet."""
    try:
        check_writable(Path(text))
    except OSError as error:
        raise ArgumentTypeError(f"expected a file that can be written, got {text!r}: {error.strerror}") from None
    return Path(text)


def picture(text: str) -> Path:
    """Parse the name of a picture to draw."""
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("needs matplotlib: pip install 'ringcomm[bench]'")
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentTypeError(f"expected a .png, .svg or .pdf, got {text!r}")
    return output(text)


def one_of(what: str, known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of the `known` names."""

    def parse(name: str) -> str:
        if name not in known:
            raise ArgumentTypeError(str(unknown(what, name, known)))
        return name

    return parse


def several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of values with commas between them, as in 2,4,8; it drops repeated ones."""
    return lambda text: list(dict.fromkeys(parse(word.strip()) for word in text.split(",")))


def parse_bytes(text: str) -> int:
    """Parse 64, 64K, 64M or 64G."""
    unit = UNITS.get(text[-1:].upper(), 0)
    number = text[:-1] if unit else text
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentTypeError(f"expected a size such as 4, 64K, 16M or 1G, got {text!r}")
    return int(number) * (unit or 1)


def sizes(begin: int, end: int, factor: int) -> list[int]:
    """Return the sizes from -b to -e, each -f times the one before."""
    if begin > end:
        raise ArgumentError(f"sizes: expected -b <= -e, got {begin} > {end} bytes")
    return [*takewhile(lambda size: size <= end, (begin * factor**i for i in count()))]


def readable(size: int) -> str:
    """Return 4 B, 64 KiB, 16 MiB or 1 GiB."""
    name, unit = next(((f"{name}iB", unit) for name, unit in UNITS.items() if size >= unit), ("B", 1))
    return f"{size // unit} {name}"
