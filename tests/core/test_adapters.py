"""How arrays become pointer, count and dtype: everything that ADAPTERS can read or must refuse."""

import array
import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest
import torch

from cases.collectives import Exporter
from ringcomm import ArgumentError
from ringcomm.arrays.adapters import ADAPTERS, dtype_of
from ringcomm.native import ffi
from ringcomm.types import DTYPES


def memory(x, writable=True):
    return ADAPTERS[type(x)].memory(x, writable)


def address(pointer):
    return int(ffi.cast("uintptr_t", pointer))


@pytest.mark.parametrize(
    ("x", "count", "name"),
    [
        (bytearray(5), 5, "uint8"),
        (bytearray(), 0, "uint8"),
        (memoryview(bytearray(8)).cast("f"), 2, "float32"),
        (memoryview(bytearray(12)).cast("B").cast("h", (2, 3)), 6, "int16"),
        (array.array("d", [1, 2, 3]), 3, "float64"),
        (array.array("q", [1]), 1, "int64"),
        ((ctypes.c_uint16 * 4)(), 4, "uint16"),
        (mmap.mmap(-1, 16), 16, "uint8"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_object_with_the_buffer_protocol_is_read_in_place(x, count, name):
    assert memory(x)[1:] == (count, DTYPES[name])


class ExporterBefore1(Exporter):
    def __dlpack__(self, stream=None):
        return self.data.__dlpack__()


def test_an_exporter_before_dlpack_1_can_be_sent_and_the_refusal_names_the_cure():
    x = ExporterBefore1(torch.zeros(4))
    assert memory(x, writable=False)[1] == 4
    with pytest.raises(ArgumentError, match=r"expected a writable one.*DLPack 1\.0.*pass torch\.from_dlpack\(x\)"):
        memory(x)
    assert address(memory(torch.from_dlpack(x))[0]) == x.data.data_ptr()


def test_a_dlpack_dtype_that_numpy_does_not_know_is_refused():
    with pytest.raises(ArgumentError, match="NumPy cannot read this Exporter: "):
        memory(Exporter(torch.zeros(2, dtype=torch.bfloat16)))


def test_a_dlpack_exporter_on_a_gpu_is_refused():
    class OnGpu(Exporter):
        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(ArgumentError, match=r"expected host memory, or a GPU's"):
        memory(OnGpu(np.zeros(1)))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"data": (4096, True)}, r"expected a writable one, got a read-only one \(OnGpu, <f4, shape \(4,\)\)"),
        ({"strides": (8,)}, r"expected C-contiguous, got a non-contiguous array \(OnGpu, <f4, shape \(4,\)\)"),
        ({"data": (0, False)}, r"OnGpu cannot be read: a null pointer to an array of shape \(4,\)"),
        ({"mask": object()}, "the memory of this OnGpu cannot be read: masked arrays on a GPU have no buffer"),
    ],
)
def test_an_array_on_a_gpu_that_a_kernel_cannot_write_is_refused(facts, words):
    class OnGpu:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), **facts}  # noqa: RUF012

    with pytest.raises(ArgumentError, match=words):
        memory(OnGpu())


def test_a_tensor_off_the_host_is_refused():
    with pytest.raises(ArgumentError, match=r"expected memory of the host or of a GPU, got meta"):
        memory(torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), r"torch\.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), r"torch\.sparse_csr"),
        (lambda: torch.eye(3).to_sparse_csc(), r"torch\.sparse_csc"),
        (lambda: torch.ones(3).to_mkldnn(), r"torch\._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "a nested one"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested")
def test_a_tensor_that_is_not_dense_is_refused(make, kind):
    with pytest.raises(ArgumentError, match=f"expected a dense tensor, got {kind}"):
        memory(make())


def test_a_tensor_inside_vmap_is_refused():
    with pytest.raises(ArgumentError, match=r"expected memory of its own, got none \(Tensor, "):
        torch.func.vmap(memory)(torch.ones(3, 2))


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((4, 4)).T,
        np.zeros((4, 4), order="F"),
        np.zeros(8)[::2],
        torch.zeros((4, 3)).T,
        memoryview(bytearray(8))[::2],
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(1, dtype=torch.complex64).conj().imag,
    ],
)
def test_noncontiguous_arrays_are_refused(x):
    words = ", or lazily conjugated values" if isinstance(x, torch.Tensor) else ""
    with pytest.raises(ArgumentError, match=rf"expected C-contiguous, got a non-contiguous array{words} \("):
        memory(x)


def test_a_read_only_array_can_be_sent_but_not_written():
    x = np.zeros(3)
    x.flags.writeable = False
    for each, words in ((x, r"ndarray, float64, shape \(3,\)"), (b"abc", "ndarray, uint8")):
        assert memory(each, writable=False)[1] == 3
        with pytest.raises(ArgumentError, match=rf"expected a writable one, got a read-only one \({words}"):
            memory(each)


@pytest.mark.parametrize("dtype", [">f4", "O", "M8[s]", "S3", "U2", "longdouble", [("a", "i4")], ml_dtypes.int4])
def test_a_dtype_the_kernels_do_not_know_is_refused(dtype):
    with pytest.raises(ArgumentError, match=r"dtype: expected one of bool, int8.*native byte order"):
        memory(np.zeros(2, dtype))


@pytest.mark.parametrize("dtype", ["q", "l", "=f4", "<f4"])
def test_other_spellings_of_a_dtype_are_the_same_dtype(dtype):
    assert memory(np.zeros(2, dtype))[2] == DTYPES[np.dtype(dtype).name]


def test_a_tensor_dtype_the_kernels_do_not_know_is_refused():
    with pytest.raises(ArgumentError, match=r"dtype: expected one of bool.* got torch\.float8_e5m2fnuz"):
        memory(torch.zeros(2, dtype=torch.float8_e5m2fnuz))


@pytest.mark.parametrize("x", [None, 3, [1, 2], "text", object()])
def test_an_object_that_is_not_an_array_is_refused(x):
    with pytest.raises(ArgumentError, match=f"expected NumPy, PyTorch.* got {type(x).__name__}"):
        memory(x)


def test_the_pointer_keeps_the_memory_alive():
    pointer, count, _ = memory(np.full(1000, 7, np.uint8))
    assert bytes(ffi.buffer(pointer)) == b"\7" * count


def test_dtypes_are_found_by_any_name():
    assert dtype_of("float32") == (np.dtype(np.float32), DTYPES["float32"])
    assert dtype_of(ml_dtypes.bfloat16)[1] == DTYPES["bfloat16"]
    with pytest.raises(ArgumentError, match="unknown dtype 'flaot32'; did you mean 'float32'"):
        dtype_of("flaot32")
