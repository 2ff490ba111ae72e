"""Torch's own transformers go all the way, with their fused fast path and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import TORCH, TorchArchitecture
from zoo_steps import all_the_way


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("architecture", TORCH, ids=lambda architecture: architecture.name)
def test_torch_transformer(architecture: TorchArchitecture, fast_path: bool, tmp_path: Path) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        coverage = all_the_way(architecture, tmp_path)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    products = [row for row in coverage if row.kind != "residual_add" and row.quantized]
    assert len(products) == architecture.products, [row.name for row in products]
    assert coverage.share == 1
