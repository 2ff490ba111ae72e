"""The kernels in Triton's interpreter, which runs them on a CPU, and the distance of two results in steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need enginequant[triton]")
if torch.cuda.is_available():
    pytest.skip("with a GPU, Triton does not interpret its kernels", allow_module_level=True)

from quantizer.numerics.triton_kernels import attention, norms, products

__all__ = ["attention", "norms", "products", "steps"]


def steps(first: Tensor, second: Tensor) -> int:
    """Return how many representable numbers lie between two tensors of one type, at most; NaN equals NaN."""
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    if first.dtype == torch.int8:
        return int((first.int() - second.int()).abs().max())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    missing = first.float().isnan()
    assert torch.equal(missing, second.float().isnan())

    def ordered(value: Tensor) -> Tensor:
        width = 8 * value.element_size()
        codes = value.view(bits).long() & (2**width - 1)
        magnitude = codes & (2 ** (width - 1) - 1)
        return torch.where(codes >> (width - 1) == 1, -magnitude, magnitude)

    apart = (ordered(first) - ordered(second)).abs()
    return int(apart[~missing].max()) if not bool(missing.all()) else 0
