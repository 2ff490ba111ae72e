"""Attention that skips padding in one kernel, against PyTorch's attention in float32 with the same operands.

The weights of v and the result are rounded to the type of v, each by at most half a step: the error is below 2^-10 of
the largest v for float16. Triton's interpreter truncates to bfloat16: the error is below 2^-6.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from triton_kernels.interpreted import attention, steps

from quantizer.numerics.triton_kernels import reference
from quantizer.numerics.triton_kernels.tiles import ATTENTION_TILES, AttentionTile

TILE = AttentionTile(queries=32, keys=32, warps=4, stages=2)
BOUNDS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-6}
SIZES = [
    *((1, 1, 1, 1, 32), (2, 3, 7, 7, 64), (1, 2, 33, 65, 80), (3, 1, 40, 129, 128), (1, 1, 300, 300, 32)),
    *((1, 2, 64, 64, 64), (2, 1, 5, 300, 16), (1, 1, 300, 1, 8)),
]
"""Samples, heads, queries, keys and the width of a head."""


def _operands(size: tuple[int, ...], dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, in the memory of a linear layer's results: [B, L, H, D]."""
    samples, heads, queries, keys, width = size
    generator = torch.Generator().manual_seed(sum(size))
    shapes = [(samples, length, heads, width) for length in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v


def _mask(real: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """The lowest number where a key [B, K] is not real."""
    return torch.where(real, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None, :]


def _prefixes(samples: int, keys: int) -> Tensor:
    """Real keys at the beginning: one, and more in each sample."""
    lengths = torch.tensor([1 + (keys - 1) * (row + 1) // (samples + 1) for row in range(samples)])
    return torch.arange(keys) < lengths[:, None]


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, tile: AttentionTile = TILE) -> Tensor:
    """The result of the kernel, which is held to the bound."""
    scale = q.shape[3] ** -0.5
    found = attention.attention(q, k, v, mask, scale, tile)
    lowest = torch.finfo(mask.dtype).min
    added = torch.where(mask <= lowest, torch.finfo(torch.float32).min, mask.float())
    expected = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), added, scale=scale)
    assert found.dtype == q.dtype
    assert found.shape == expected.shape
    assert found.transpose(1, 2).is_contiguous()
    error = (found.float() - expected).abs().max()
    assert error <= BOUNDS[q.dtype] * v.float().abs().max()
    return found


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_padding_at_the_end(size: tuple[int, ...], dtype: torch.dtype) -> None:
    _check(*_operands(size, dtype), _mask(_prefixes(size[0], size[3]), dtype))


@pytest.mark.parametrize("tile", ATTENTION_TILES, ids=str)
def test_every_tile(tile: AttentionTile) -> None:
    size = (2, 1, 140, 140, 64)
    _check(*_operands(size), _mask(_prefixes(2, 140)), tile)


def test_padding_anywhere() -> None:
    """Left padding, holes, a single real key, no padding, and only padding in one sample each."""
    keys = 100
    at = torch.arange(keys)
    samples = [at >= 70, (at % 7 == 3) | (at > 90), at == 40, at >= 0, at < 0, at == keys - 1]
    found = _check(*_operands((len(samples), 1, 40, keys, 32)), _mask(torch.stack(samples)))
    assert bool(found.isfinite().all())


def test_a_sample_of_padding_is_the_mean_of_the_values() -> None:
    q, k, v = _operands((2, 1, 5, 70, 16))
    for lowest in (torch.finfo(torch.float16).min, -torch.inf):
        mask = torch.zeros(2, 1, 1, 70, dtype=torch.float16)
        mask[1] = lowest
        found = attention.attention(q, k, v, mask, 1.0, TILE)[1]
        torch.testing.assert_close(
            found.float(), v[1].float().mean(1, keepdim=True).expand(1, 5, 16), rtol=0, atol=1e-3
        )


def test_blocks_of_padding_are_not_read() -> None:
    """NaN lies in them, and reaches the result if it is read."""
    q, k, v = _operands((3, 2, 40, 160, 32))
    real = torch.stack([torch.arange(160) < 30, torch.arange(160) >= 128, torch.arange(160) // 32 == 2])
    expected = _check(q, k, v, _mask(real))
    holes = ~torch.stack([row.reshape(5, 32).any(1).repeat_interleave(32) for row in real])
    for operand in (k, v):
        operand.transpose(1, 2)[holes] = torch.nan
    assert torch.equal(attention.attention(q, k, v, _mask(real), 32**-0.5, TILE), expected)


@pytest.mark.parametrize("low", [-1e4, -5e4, -torch.inf])
def test_other_numbers_for_padding(low: float) -> None:
    q, k, v = _operands((2, 1, 20, 70, 32))
    real = _prefixes(2, 70)
    expected = _check(q, k, v, _mask(real))
    mask = torch.where(real, 0.0, low).half()[:, None, None, :]
    assert torch.equal(attention.attention(q, k, v, mask, 32**-0.5, TILE), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1, 70), (1, 3, 1, 70), (2, 1, 1, 70), (2, 3, 1, 1)])
def test_numbers_that_are_added_to_scores(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    _check(*_operands((2, 3, 20, 70, 32)), mask)


@pytest.mark.parametrize(("dtype", "point"), [(torch.int8, 0), (torch.int8, -20), (torch.float8_e4m3fn, 0)])
@pytest.mark.parametrize("by_column", [False, True])
def test_quantized_values(dtype: torch.dtype, point: int, by_column: bool) -> None:
    """They are those of the result in floats, but for a step where its last bit decides."""
    q, k, v = _operands((2, 3, 20, 70, 16))
    mask = _mask(_prefixes(2, 70))
    generator = torch.Generator().manual_seed(0)
    next_scale = 0.01 + 0.02 * torch.rand(48 if by_column else 1, generator=generator)
    options = {"quantized_as": dtype, "next_scale": next_scale, "zero_point": point}
    found = attention.attention(q, k, v, mask, 0.25, TILE, **options)
    floats = attention.attention(q, k, v, mask, 0.25, TILE).transpose(1, 2).flatten(2).float()
    expected = reference.quantized(floats, next_scale, dtype, point).view(2, 20, 3, 16).transpose(1, 2)
    assert found.stride() == expected.stride()
    assert steps(found.contiguous(), expected.contiguous()) <= 1


def test_large_scores_and_masks() -> None:
    q, k, v = _operands((2, 1, 20, 70, 32), torch.bfloat16)
    mask = _mask(_prefixes(2, 70), torch.bfloat16)
    mask[0, 0, 0, 50:] = -3e38
    _check(100 * q, 100 * k, v, mask)
    assert bool(attention.attention(q, k, v, torch.full_like(mask, -3e38), 1.0, TILE).isfinite().all())


@pytest.mark.filterwarnings("ignore:(All-NaN slice|invalid value) encountered:RuntimeWarning")
def test_nan_stays_in_its_sample() -> None:
    q, k, v = _operands((3, 1, 20, 70, 32))
    mask = _mask(_prefixes(3, 70))
    mask[1, 0, 0, 60], q[2, 0, 4] = torch.nan, torch.nan
    missing = attention.attention(q, k, v, mask, 1.0, TILE).isnan().any(3)[:, 0]
    assert missing.sum(1).tolist() == [0, 20, 1]
