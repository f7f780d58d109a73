"""all_reduce, the sum with a residual, and RMSNorm as one call, on the CPU and on the emulated GPU."""

from functools import wraps

import device_tensors
import numpy as np
import pytest
import torch
import torch.distributed as dist
from device_tensors import DeviceTensor, on_device

import ringcomm.torch
from harness import torch_world
from ringcomm import ArgumentError, MismatchError
from ringcomm.devices import emulated
from ringcomm.native import check, ffi, lib
from ringcomm.transports.calls import CollectiveCall
from ringcomm.types import DTYPES as TYPES

DTYPES = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5


def inputs_of(rank, shape, dtype):
    """Return x of a rank, and residual and weight, which all ranks have."""
    random = torch.Generator().manual_seed(rank)
    x = 4 * torch.randn(shape, generator=random).to(dtype)
    random.manual_seed(1000)
    return x, torch.randn(shape, generator=random).to(dtype), torch.randn(shape[-1], generator=random).to(dtype)


def steps(shape, dtype):
    """Return what the steps give, one after another, where all_reduce adds in rank order and rounds once."""
    ranks = [inputs_of(rank, shape, dtype) for rank in range(dist.get_world_size())]
    total = sum(x.float() for x, _, _ in ranks).to(dtype) + ranks[0][1]
    mean = total.double().pow(2).mean(-1, keepdim=True).float()
    scale = 1 / np.sqrt((mean + EPS).numpy())
    return (total.float() * torch.from_numpy(scale)).to(dtype) * ranks[0][2], total


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.Tensor(one), other, rtol=0, atol=0)


def call(shape, dtype, place=lambda tensor: tensor):
    """Make the call; return its results, and how many kernels it has launched."""
    x, residual, weight = map(place, inputs_of(dist.get_rank(), shape, dtype))
    before, launched = x.clone(), emulated.calls().launches
    results = ringcomm.torch.all_reduce_rms_norm(x, residual, weight, EPS)
    emulated.device.stream().synchronize()
    assert torch.equal(torch.Tensor(x), torch.Tensor(before))
    return results, emulated.calls().launches - launched


@torch_world.on(1, 3)
@torch_world.each("dtype", DTYPES)
@torch_world.each("shape", [(5, 24), (3,), (2, 3, 8), (0, 8), (1, 4096)])
def test_on_the_cpu_it_is_its_steps(shape, dtype):
    got, _ = call(shape, dtype)
    assert_same(got, steps(shape, dtype))


def on_gpus(test):
    @wraps(test)
    def test_on_gpus():
        with pytest.MonkeyPatch.context() as patch:
            device_tensors.install(patch)
            x = on_device(torch.ones(1))
            dist.all_reduce(x)  # connects
            emulated.device.stream().synchronize()
            test()

    return test_on_gpus


@torch_world.on(1, 2, 3)
@on_gpus
def test_on_gpus_it_is_one_launch_with_the_bits_of_its_steps():
    shape = emulated.device.shape
    for dtype in DTYPES:
        row = shape.stage_bytes // dtype.itemsize  # the longest
        for rows, width in ((1, 8), (1, row), (2, 8), (3, row // 2), (17, 16), (1, 24), (7, 64)):
            got, launched = call((rows, width), dtype, on_device)
            assert launched == 1
            expected = steps((rows, width), dtype)
            assert_same(got, expected)


def refused(group, dtype="float32", width=8, epsilon=EPS, **addresses):
    call = CollectiveCall(ffi.cast("void *", 32), ffi.cast("void *", addresses.get("target", 32)), 32, TYPES[dtype])
    arrays = {name: ffi.cast("void *", addresses.get(name, 32)) for name in ("residual", "weight", "output")}
    norm = {**arrays, "width": width, "epsilon": epsilon}
    check(lib.rc_gpus_rms_norm(group.handle, [call], [norm], ffi.NULL, -1.0, lib.RC_GPUS_PLAIN, ffi.NULL))


REFUSED = [
    ({"dtype": "int32"}, r"call: expected a sum of float16, bfloat16 or float32, got all_reduce\(int32 x 32, sum\)"),
    ({"width": 12}, "norm.width: expected a multiple of 4 that divides 32 and is at most 256, got 12"),
    ({"epsilon": -1.0}, "norm.epsilon: expected a finite number of at least 0, got -1"),
    ({"weight": 0}, "norm.weight"),
    ({"target": 200}, "call.target: expected an address that is a multiple of 16, got 0xc8"),
    ({"output": 36}, "norm.output: expected an address that is a multiple of 16, got 0x24"),
]


@torch_world.on(2)
@on_gpus
def test_rows_that_no_kernel_takes_are_left_to_the_steps():
    item, group = 4, dist.group.WORLD.comm._router._group
    longest = emulated.device.shape.stage_bytes // item
    for rows, width, can in (
        (1, longest, True),
        (1, longest + 4, False),
        (3, 10, False),
        (1000, 64, False),
        (0, 8, False),
    ):
        call = CollectiveCall(None, None, rows * width, TYPES["float32"])
        assert group.can_normalize(call, width) is can
        with pytest.MonkeyPatch.context() as patch:  # what counts is the memory that the ranks have agreed on
            patch.setattr(emulated.EmulatedDevice, "shape", emulated.device.shape._replace(channels=1 << 20))
            assert group.can_normalize(call, width) is can
    for changes, text in REFUSED:
        with pytest.raises(ArgumentError, match=text):
            refused(group, **changes)


def different():
    width = 8 if dist.get_rank() else 16
    with pytest.raises(
        MismatchError, match=r"different calls(.|\n)*RMSNorm of rows of 16(.|\n)*RMSNorm of rows of 8, eps"
    ):
        call((32 // width, width), torch.float32, on_device)
    got, _ = call((2, 8), torch.float32, on_device)
    assert_same(got[1:], steps((2, 8), torch.float32)[1:])


@torch_world.on(2)
def test_rows_of_different_widths_are_a_mismatch():
    with pytest.MonkeyPatch.context() as patch:
        device_tensors.install(patch)
        patch.setattr(emulated.EmulatedDevice, "blocking", True)  # so that the call itself raises
        different()


@torch_world.on(2)
def test_tensors_that_are_not_dense_are_copied():
    x, residual, weight = (tensor[..., 1:] for tensor in inputs_of(dist.get_rank(), (4, 9), torch.float32))
    _, total = ringcomm.torch.all_reduce_rms_norm(x, residual, weight, EPS)
    ranks = [inputs_of(rank, (4, 9), torch.float32)[0][:, 1:] for rank in range(dist.get_world_size())]
    assert_same([total], [sum(ranks) + residual])


@torch_world.on(2)
def test_wrong_arguments_are_refused():
    x = torch.ones(2, 8)

    def refused(match, *arguments, **options):
        with pytest.raises(ArgumentError, match=match):
            ringcomm.torch.all_reduce_rms_norm(*arguments, **options)

    refused("x: expected a tensor of float16, bfloat16 or float32, got torch.float64", x.double(), x, x[0])
    refused(r"x: expected rows of one or more elements, got the shape \(\)", torch.tensor(1.0), x, x[0])
    refused(r"x: expected rows of one or more elements, got the shape \(2, 0\)", x[:, :0], x, x[0])
    refused(r"residual: expected the shape \(2, 8\), as x has \(2, 8\), got \(1, 8\)", x, x[:1], x[0])
    refused(r"weight: expected the shape \(8,\), as x has \(2, 8\), got \(7,\)", x, x, x[0, 1:])
    refused("weight: expected torch.float32, as x, got torch.float16", x, x, x[0].half())
    refused("residual: expected a tensor on cpu, as x, got meta", x, x.to("meta"), x[0])
    refused("eps: expected a finite number >= 0, got nan", x, x, x[0], float("nan"))
    refused("eps: expected a finite number >= 0, got None", x, x, x[0], None)
    refused("x: expected a tensor, got a ndarray", x.numpy(), x, x[0])
    refused("x: expected a dense tensor, got torch.sparse_coo", x.to_sparse(), x, x[0])
    refused("weight: expected a tensor, got a NoneType", x, x, None)
    without_rank_1 = dist.new_group([0])
    if dist.get_rank():
        refused("group of all_reduce_rms_norm: expected one with this rank", x, x, x[0], group=without_rank_1)
    refused("expected a process group, or None for the default one, got 'world'", x, x, x[0], group="world")
    assert_same(call((2, 8), torch.float32)[0], steps((2, 8), torch.float32))  # the group is usable


def test_without_a_group_of_ringcomm_it_is_refused():
    x = DeviceTensor(torch.ones(1, 8))
    with pytest.raises(ArgumentError, match="whose tensors on GPUs use the backend ringcomm, got no default"):
        ringcomm.torch.all_reduce_rms_norm(x, x, x[0])
