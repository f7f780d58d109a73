"""How arrays become pointer, count and dtype: everything that ADAPTERS can read or must refuse."""

import array
import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest
import torch

from ringcomm import ArgumentError
from ringcomm.bench.machine import gpus
from ringcomm.buffer import ADAPTERS, dtype_of
from ringcomm.native import ffi
from ringcomm.types import DTYPES


def memory(x, writable=True):
    return ADAPTERS[type(x)].memory(x, writable)


def address(pointer):
    return int(ffi.cast("uintptr_t", pointer))


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", DTYPES)
def test_a_numpy_array_of_every_dtype_is_read_in_place(name):
    x = np.zeros((2, 3), numpy_dtype(name))
    pointer, count, dtype = memory(x)
    assert (address(pointer), count, dtype) == (x.ctypes.data, 6, DTYPES[name])


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_a_tensor_of_every_dtype_is_read_in_place(name):
    x = torch.zeros((2, 3), dtype=getattr(torch, name))
    pointer, count, dtype = memory(x)
    assert (address(pointer), count, dtype) == (x.data_ptr(), 6, DTYPES[name])


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


def test_bytes_can_be_sent_but_not_written():
    assert memory(b"abc", writable=False)[1:] == (3, DTYPES["uint8"])
    with pytest.raises(ArgumentError, match="expected a writable one, got a read-only one"):
        memory(b"abc")


class Exported:
    """An object that supports DLPack only."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


@pytest.mark.parametrize("data", [np.zeros((2, 2), np.int32), torch.zeros((2, 2), dtype=torch.int32)])
def test_a_dlpack_exporter_on_the_host_is_read_in_place(data):
    pointer, count, dtype = memory(Exported(data), writable=False)
    where = data.data_ptr() if isinstance(data, torch.Tensor) else data.ctypes.data
    assert (address(pointer), count, dtype) == (where, 4, DTYPES["int32"])
    assert ADAPTERS[Exported].shape(Exported(data)) == (2, 2)


class ExportedBefore1(Exported):
    def __dlpack__(self, stream=None):
        return self.data.__dlpack__()


def test_an_exporter_before_dlpack_1_can_be_sent_and_the_refusal_names_the_cure():
    x = ExportedBefore1(torch.zeros(4))
    assert memory(x, writable=False)[1] == 4
    with pytest.raises(ArgumentError, match=r"expected a writable one.*DLPack 1\.0.*pass torch\.from_dlpack\(x\)"):
        memory(x)
    assert address(memory(torch.from_dlpack(x))[0]) == x.data.data_ptr()


def test_a_dlpack_dtype_that_numpy_does_not_know_is_refused():
    with pytest.raises(ArgumentError, match="NumPy cannot read this Exported: "):
        memory(Exported(torch.zeros(2, dtype=torch.bfloat16)))


def test_a_dlpack_exporter_on_a_gpu_is_refused():
    class OnGpu(Exported):
        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(ArgumentError, match=r"expected host memory, or a GPU's"):
        memory(OnGpu(np.zeros(1)))


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_a_cuda_array_is_refused_where_there_is_no_gpu():
    class CudaArray:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    with pytest.raises(ArgumentError, match=r"arrays on a GPU need CuPy|no GPU can be used"):
        memory(CudaArray())


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


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_scalars_and_empty_arrays_are_arrays(shape, make):
    assert memory(make(shape))[1] == np.prod(shape, dtype=int)


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
    with pytest.raises(ArgumentError, match="expected C-contiguous, got a non-contiguous array"):
        memory(x)


def test_only_errors_of_tensors_mention_lazy_conjugation():
    for x, words in (
        (np.zeros((4, 4), order="F"), r"got a non-contiguous array \(ndarray, float64, shape \(4, 4\)\)"),
        (torch.zeros((4, 3)).T, r"got a non-contiguous array, or lazily conjugated values \(Tensor, torch.float32, "),
    ):
        with pytest.raises(ArgumentError, match=words):
            memory(x)


def test_a_read_only_array_can_be_sent_but_not_written():
    x = np.zeros(3)
    x.flags.writeable = False
    assert memory(x, writable=False)[1] == 3
    with pytest.raises(ArgumentError, match=r"writable one, got a read-only one \(ndarray, float64, shape \(3,\)\)"):
        memory(x)


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


def test_a_tensor_that_requires_grad_is_raw_memory():
    x = torch.zeros(3, requires_grad=True)
    assert address(memory(x)[0]) == x.data_ptr()


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (np.zeros(2, np.int16), np.ndarray),
        (array.array("h", [1, 2]), np.ndarray),
        (torch.zeros(2, dtype=torch.int16), torch.Tensor),
        (torch.nn.Parameter(torch.zeros(2)), torch.Tensor),
    ],
)
def test_a_new_array_has_the_kind_of_the_input(x, kind):
    adapter = ADAPTERS[type(x)]
    new = adapter.empty(x, (3, 2))
    assert isinstance(new, kind)
    assert (adapter.shape(x), tuple(new.shape)) == ((2,), (3, 2))
    assert memory(new)[2] == memory(x)[2]


def test_the_pointer_keeps_the_memory_alive():
    pointer, count, _ = memory(np.full(1000, 7, np.uint8))
    assert bytes(ffi.buffer(pointer)) == b"\7" * count


def test_dtypes_are_found_by_any_name():
    assert dtype_of("float32") == (np.dtype(np.float32), DTYPES["float32"])
    assert dtype_of(ml_dtypes.bfloat16)[1] == DTYPES["bfloat16"]
    with pytest.raises(ArgumentError, match="unknown dtype 'flaot32'; did you mean 'float32'"):
        dtype_of("flaot32")
