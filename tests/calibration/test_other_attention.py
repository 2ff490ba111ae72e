"""A model whose attention by separate products computes something else than the attention which it is set to."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer


class Attention(nn.Module):
    """Attention that is causal if it is computed by separate products, and with sdpa where ``causal``."""

    def __init__(self, causal: bool, drop: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.causal, self.drop = causal, drop
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        # Random numbers in eval mode, as a masked autoencoder draws them.
        q, k, v = self.project(nn.functional.dropout(x, 0.5, training=self.drop)).chunk(3, dim=-1)
        if self.config._attn_implementation == "sdpa":
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


def test_another_function_is_told_once() -> None:
    model = Attention(causal=False).eval()
    q = Quantizer(preset="plain")
    proxy = q.calib(model)
    proxy(torch.randn(2, 8, 32))
    with pytest.warns(
        UserWarning, match=r"Attention gives other outputs .* dB on the first batch\), because one of them"
    ):
        assert q.coverage.multiply_adds > 0
    proxy(torch.randn(2, 8, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q.quantize(model)
    assert model.config._attn_implementation == "sdpa"
    assert proxy.config._attn_implementation == "eager"


@pytest.mark.parametrize("drop", [False, True], ids=["the same function", "random"])
def test_nothing_is_told_of(drop: bool) -> None:
    x = torch.randn(2, 8, 32)
    q = Quantizer(preset="plain")
    q.calibrate(Attention(causal=not drop, drop=drop).eval(), [x])
    assert {row.multiply_adds for row in q.coverage if row.kind == "linear"} == {2 * 8 * 32 * 96}
