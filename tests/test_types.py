"""The tables of types.py."""

import re
from pathlib import Path

import pytest

import ringcomm
from ringcomm.native import check, ffi, lib
from ringcomm.transports.blocks import said
from ringcomm.types import COLLECTIVES, DTYPES, OPS, REDUCING, ROOTED, WHOLE

ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16}


@pytest.mark.parametrize(
    ("table", "enumeration", "prefix"),
    [
        (COLLECTIVES, "enum rc_collective", "RC_"),
        ({name.replace("_e4m3fn", "_e4m3"): code for name, code in DTYPES.items()}, "enum rc_dtype", "RC_"),
        ({name: code for name, (code, _) in OPS.items()} | {"premul_sum": 8}, "enum rc_op", "RC_"),
    ],
)
def test_a_table_has_the_rows_and_codes_of_the_header(table, enumeration, prefix):
    native = ffi.typeof(enumeration).relements
    last = max(native.values())
    assert {prefix + name.upper(): code for name, code in table.items()} == {
        name: code for name, code in native.items() if code != last
    }


def test_the_core_says_the_same_of_every_collective():
    rows = re.findall(
        r'{"(\w+)", (\w+), (\w+), (.+)},', (Path(__file__).parent.parent / "bindings/src/call.cpp").read_text()
    )
    facts = {name: fact for name, *fact in rows if name in COLLECTIVES}
    assert list(facts) == list(COLLECTIVES)
    assert [name for name, (shape, _, _) in facts.items() if shape == "ARRAY"] == list(WHOLE)
    assert [name for name, (_, reduces, _) in facts.items() if reduces == "true"] == list(REDUCING)
    assert [name for name, (_, _, root) in facts.items() if root == '"root"'] == list(ROOTED)


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_the_size_its_name_says(name):
    digits = "".join(filter(str.isdigit, name))
    assert lib.rc_dtype_bytes(DTYPES[name]) == (ITEM_BYTES[name] if name in ITEM_BYTES else int(digits) // 8)


def test_premul_sum_carries_its_factor():
    assert OPS[ringcomm.premul_sum(0.5)] == (lib.RC_PREMUL_SUM, 0.5)
    assert ringcomm.premul_sum(2) == ringcomm.premul_sum(2.0)


@pytest.mark.parametrize("factor", [None, "half", [1.0], 1j, pytest.param(10**400, id="huge")])
def test_a_factor_that_is_no_number_is_refused(factor):
    with pytest.raises(ringcomm.ArgumentError, match=f"factor: expected a number .* got {type(factor).__name__}"):
        ringcomm.premul_sum(factor)


def test_premul_sum_without_a_factor_says_how_to_write_it():
    with pytest.raises(ringcomm.ArgumentError, match=r"ringcomm\.premul_sum\(factor\)"):
        OPS["premul_sum"]


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(ringcomm.ArgumentError, match="unknown op 'summ'; did you mean 'sum'"):
        OPS["summ"]
    with pytest.raises(ringcomm.ArgumentError, match="known: avg, band"):
        OPS[len]


def test_looking_up_unknown_ops_leaves_no_trace():
    before = dict(OPS)
    assert OPS[ringcomm.premul_sum(3)] == (lib.RC_PREMUL_SUM, 3.0)
    assert dict(OPS) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("barrier", 0, 0, 0, 1.0, 0), "barrier()"),
        (("all_reduce", 0, 3, 8, 0.0, 0), "all_reduce(bool x 3, premul_sum(0))"),
        (("reduce", 0, 3, 0, 1.0, 2), "reduce(bool x 3, sum, root 2)"),
        (("all_gather", 0, (1, 2), 0, 1.0, 0), "all_gather(bool x 3 in all, with counts)"),
        (("all_to_all", 0, None, 0, 1.0, 0), "all_to_all(bool, with counts)"),
        (("reduce_scatter", 0, (1, 2), 8, 0.5, 0), "reduce_scatter(bool x 3 in all, with counts, premul_sum)"),
    ],
)
def test_a_call_is_said_in_the_words_of_the_core(call, words):
    assert said(*call).words == words


@pytest.mark.parametrize("collective", [-1, len(COLLECTIVES)])
def test_a_collective_that_is_none_is_not_described(collective):
    text = ffi.new("char[]", 100)
    with pytest.raises(ringcomm.ArgumentError, match=f"there is no collective {collective}"):
        check(lib.rc_describe(collective, 0, 0, 0, 1.0, 0, 0, text, len(text)))
