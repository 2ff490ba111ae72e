"""The quantization of a tensor as a kernel, against operations of torch."""

from __future__ import annotations

import pytest
import torch
from triton_kernels.interpreted import steps

from quantizer.numerics.triton_kernels import reference
from quantizer.numerics.triton_kernels.quantize import quantize


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (40, 300)])
@pytest.mark.parametrize(("dtype", "point"), [(torch.int8, 0), (torch.int8, -37), (torch.float8_e4m3fn, 0)])
@pytest.mark.parametrize("by_column", [False, True])
def test_quantize(shape: tuple[int, ...], dtype: torch.dtype, point: int, by_column: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).half()
    scale = 0.01 + 0.05 * torch.rand(shape[-1] if by_column else 1, generator=generator)
    found, expected = quantize(x, scale, point, dtype), reference.quantized(x.float(), scale, dtype, point)
    assert found.shape == x.shape
    assert steps(found, expected) <= (0 if dtype == torch.int8 else 1)
