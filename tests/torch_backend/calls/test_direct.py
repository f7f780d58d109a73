"""The direct calls of inference: packed weights give the products of F.linear, sums are those of the group."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch.utils._python_dispatch import TorchDispatchMode

from harness import torch_world
from ringcomm.torch.direct import in_place_sum, packed_linear, packs


class Called(TorchDispatchMode):
    """The operators that are called meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_packed_layer_has_the_outputs_of_linear(dtype, has_bias):
    draw = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=draw).to(dtype) for shape in ((48, 40), (48,), (2, 3, 40)))
    bias = bias if has_bias else None
    linear = packed_linear(weight, bias)
    with torch.inference_mode():
        for rows in (x, x[:1, :1], x[:, -1], x.expand(2, 3, 40)[:, :1]):  # of any shape, also with gaps
            expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
            found = linear(rows)
            assert found.dtype == dtype
            with Called() as called:
                linear(rows)
            assert ("mkldnn._linear_pointwise.default" in called.names) == packs(weight)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_weights_are_packed_where_onednn_has_kernels():
    onednn, there = torch.ops.mkldnn, torch.backends.mkldnn.is_available()
    has_kernels = {
        torch.float64: False,
        torch.float32: there,
        torch.bfloat16: there and onednn._is_mkldnn_bf16_supported(),
        torch.float16: there and onednn._is_mkldnn_fp16_supported(),
    }
    assert {dtype: packs(torch.ones(2, 2, dtype=dtype)) for dtype in has_kernels} == has_kernels
    assert not packs(torch.ones(2, 2, device="meta"))
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not packs(torch.ones(2, 2))
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@torch_world.on(1, 2, backends=("ringcomm", "gloo"))
def test_a_sum_is_that_of_the_group():
    size, cpu = dist.get_world_size(), torch.device("cpu")
    x = torch.arange(5.0) + dist.get_rank()
    in_place_sum(dist.group.WORLD, cpu)(x)
    assert x.tolist() == [size * i + size * (size - 1) / 2 for i in range(5)]
