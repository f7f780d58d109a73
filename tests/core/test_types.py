"""The tables of types.py."""

import pytest

import ringcomm
from cases.reference import numpy_dtype
from ringcomm.devices import emulated
from ringcomm.native import NULL, check, ffi, lib
from ringcomm.transports.blocks import describe
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import COLLECTIVES, CPU_DTYPES, DTYPES, ON_GPUS, OPS, PATHS, PUBLIC

PREMUL_SUM = lib.RC_PREMUL_SUM


@pytest.mark.parametrize(
    ("codes", "enumeration"),
    [
        ({name: row.code for name, row in COLLECTIVES.items()}, "enum rc_collective"),
        ({f"path_{name.replace('-', '_')}": code for code, name in enumerate(PATHS)}, "enum rc_path"),
        (DTYPES, "enum rc_dtype"),
        (
            {name: code for name, (code, _) in OPS.items()} | {"premul_sum": OPS[ringcomm.premul_sum(1)][0]},
            "enum rc_op",
        ),
    ],
)
def test_the_native_core_was_built_from_this_table(codes, enumeration):
    native = ffi.typeof(enumeration).relements
    assert {f"RC_{name.upper()}": code for name, code in codes.items()} == {
        name: code for name, code in native.items() if code != len(codes)
    }


def test_a_communicator_has_a_method_for_each_public_collective():
    assert set(PUBLIC) <= set(dir(ringcomm.Communicator))
    internal = {name: row.moves_as for name, row in COLLECTIVES.items() if name not in PUBLIC}
    assert internal == {"split": "all_gather", "empty": "all_gather", "grow": "all_gather", "close": "barrier"}


def test_in_some_collectives_no_rank_ends_before_all_have_begun():
    together = {"barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert {name for name in PUBLIC if COLLECTIVES[name].synchronizes} == together


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_without_a_cuda_kernel_is_refused(name):
    shape = {"ranks": 2, **emulated.EmulatedDevice.shape._asdict()}
    call, plan = CollectiveCall(NULL, NULL, 1, 0), ffi.new("rc_cuda_plan *")
    if lib.rc_cuda_plan_of([shape], [[]], COLLECTIVES[name].code, [call], -1, plan) == lib.RC_OK:
        assert name in ON_GPUS
        return
    assert name not in ON_GPUS
    with pytest.raises(
        ringcomm.ArgumentError, match=f"{name}: expected arrays in host memory, since it has no CUDA kernel"
    ):
        check(lib.RC_ARGUMENT)


@pytest.mark.parametrize("name", DTYPES)
def test_the_native_core_reduces_the_dtypes_of_this_table(name):
    status = lib.rc_reduce(NULL, ffi.new("void *[1]"), 1, 0, DTYPES[name], OPS["sum"][0], 1.0)
    assert (status == lib.RC_OK) == (DTYPES[name] in CPU_DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_the_size_that_numpy_gives_it(name):
    assert lib.rc_dtype_bytes(DTYPES[name]) == numpy_dtype(name).itemsize


def test_premul_sum_carries_its_factor():
    assert OPS[ringcomm.premul_sum(0.5)] == (PREMUL_SUM, 0.5)
    assert ringcomm.premul_sum(2) == ringcomm.premul_sum(2.0)


@pytest.mark.parametrize("factor", [None, "half", [1.0], 1j, pytest.param(10**400, id="huge")])
def test_a_factor_that_is_not_a_number_is_refused(factor):
    with pytest.raises(ringcomm.ArgumentError, match=f"factor: expected a number .* got {type(factor).__name__}"):
        ringcomm.premul_sum(factor)


def test_premul_sum_without_a_factor_shows_the_correct_form():
    with pytest.raises(ringcomm.ArgumentError, match=r"ringcomm\.premul_sum\(factor\)"):
        OPS["premul_sum"]


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(ringcomm.ArgumentError, match="unknown op 'summ'; did you mean 'sum'"):
        OPS["summ"]
    with pytest.raises(ringcomm.ArgumentError, match=r"known: .*avg, band"):
        OPS[len]


def test_looking_up_ops_does_not_change_the_table():
    before = dict(OPS)
    assert OPS[ringcomm.premul_sum(3)] == (PREMUL_SUM, 3.0)
    assert dict(OPS) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("barrier", 0, 0, 0, 1.0, 0), "barrier()"),
        (("all_reduce", 0, 3, PREMUL_SUM, 0.0, 0), "all_reduce(bool x 3, premul_sum(0))"),
        (("reduce", 0, 3, 0, 1.0, 2), "reduce(bool x 3, sum, root 2)"),
        (("all_gather", 0, (1, 2), 0, 1.0, 0), "all_gather(bool x 3 in all, with counts)"),
        (("all_to_all", 0, None, 0, 1.0, 0), "all_to_all(bool, with counts)"),
        (("reduce_scatter", 0, (1, 2), PREMUL_SUM, 0.5, 0), "reduce_scatter(bool x 3 in all, with counts, premul_sum)"),
    ],
)
def test_the_core_describes_a_call(call, words):
    assert describe(*call) == words


@pytest.mark.parametrize("collective", [-1, len(COLLECTIVES)])
def test_an_unknown_collective_is_not_described(collective):
    text = ffi.new("char[]", 100)
    with pytest.raises(ringcomm.ArgumentError, match=f"there is no collective {collective}"):
        check(lib.rc_describe(collective, 0, 0, 0, 1.0, 0, 0, text, len(text)))
