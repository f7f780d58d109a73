"""Attention to a block of keys: matrix products and torch's kernels agree, on a CPU and on a GPU."""

from unittest.mock import patch

import pytest
import torch

from ringcomm.parallel.context import block_attention

causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["every token", "causal"])


@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matrix_products_give_the_numbers_of_the_kernel(causal, dtype):
    """They serve where torch has no kernel: on a GPU in 32 bits, for example."""
    generator = torch.Generator().manual_seed(0)
    query, grad, *key_value = torch.randn(4, 2, 3, 8, 4, generator=generator).to(dtype)
    key_value = torch.stack(key_value)[:, :, :1]
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    kernel = block_attention.attend(query, key_value, causal, 0.3)
    products = block_attention.attend_by_matmul(query, key_value, causal, 0.3)
    torch.testing.assert_close(products, kernel, check_dtype=False, **tolerance)
    whole = grad, query, kernel[0], kernel[1], key_value, causal, 0.3
    kernel, products = block_attention.attend_backward(*whole), block_attention.attend_by_matmul_backward(*whole)
    products = [each.sum_to_size(same.shape) for each, same in zip(products, kernel, strict=True)]
    torch.testing.assert_close(products, [*kernel], check_dtype=False, **tolerance)
    assert kernel[1].dtype == products[1].dtype == torch.promote_types(dtype, torch.float32)


def test_the_kernel_of_gpus_is_called_as_torch_declares_it():
    """Compute shapes only, on the device `meta`: this machine may have no GPU."""
    query = torch.empty(2, 3, 8, 16, dtype=torch.bfloat16, device="meta")
    key_value = torch.empty(2, 2, 1, 4, 16, dtype=torch.bfloat16, device="meta")
    with patch.object(block_attention, "can_flash", lambda *_: True):
        out, lse = block_attention.attend(query, key_value, False, 0.3)
        grads = block_attention.attend_backward(out, query, out, lse, key_value, False, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
    assert [grad.shape for grad in grads] == [query.shape, key_value.shape[1:], key_value.shape[1:]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_on_a_gpu_equal_those_on_a_cpu(causal, dtype):
    generator = torch.Generator().manual_seed(0)
    query, grad, *key_value = torch.randn(4, 2, 3, 64, 32, generator=generator).to(dtype)
    key_value = torch.stack(key_value)[:, :, :1]
    out, lse = block_attention.attend(query, key_value, causal, 0.3)
    expected = out, lse, *block_attention.attend_backward(grad, query, out, lse, key_value, causal, 0.3)
    query, grad, key_value = (each.cuda() for each in (query, grad, key_value))
    assert block_attention.can_flash(query, *key_value.expand(-1, -1, 3, -1, -1), causal) is (dtype == torch.bfloat16)
    out, lse = block_attention.attend(query, key_value, causal, 0.3)
    found = out, lse, *block_attention.attend_backward(grad, query, out, lse, key_value, causal, 0.3)
    found = [each.cpu() for each in found]
    torch.testing.assert_close(found, [*expected], rtol=0.02, atol=0.02, check_dtype=False)
