"""What every stage leaves as it was: the model, its frozen copies, padding, and the names of the former toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import ConvNet, Mlp, Snapshot
from torch import Tensor, nn

from quantizer import Quantizer


def _error(calibrator: str, model: nn.Module, batches: list[Tensor]) -> float:
    """The error that a calibrator leaves in the output of a model with one site, relative row by row."""
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": calibrator})
    q.calibrate(model, batches)
    quantized = q.quantize(model)
    with torch.no_grad():
        pairs = [(quantized(batch).double(), model(batch).double()) for batch in batches]
    return sum(float(((found - right).square().sum(-1) / right.square().sum(-1)).sum()) for found, right in pairs)


@pytest.mark.parametrize("outlier", [0.0, 6.0, 40.0, 4000.0])
def test_auto_is_as_good_as_the_best_of_all(outlier: float) -> None:
    model = nn.Linear(32, 16).eval()
    batches = [torch.randn(256, 32) for _ in range(2)]
    batches[1][7, 5] += outlier
    others = {name: _error(name, model, batches) for name in ("max", "percentile", "mse", "entropy")}
    # The range was chosen while the weight was not yet rounded.
    assert _error("auto", model, batches) <= min(others.values()) * 1.01
    assert outlier == 0.0 or max(others.values()) > 1.01 * min(others.values())  # there was something to choose


class _Pooled(nn.Module):
    """[B, S, 16] under a mask [B, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[:, :, None].to(hidden.dtype)
        return (self.layer(hidden) * weights).sum(1) / weights.sum(1)


def test_padding_is_left_out_where_the_mask_is_named() -> None:
    model, hidden = _Pooled().eval(), torch.randn(4, 6, 16)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1:, 4:] = 0
    hidden[mask == 0] = 100.0

    def amax(batch: dict[str, Tensor] | tuple[Tensor, ...]) -> float | None:
        q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
        q.calibrate(model, [batch])
        return q.plan["layer.forward.linear_0"].operands[0].largest_amax

    assert amax({"hidden": hidden, "attention_mask": mask}) == hidden[mask == 1].abs().max()
    assert amax((hidden, mask)) == 100.0


def test_the_vocabulary_of_the_former_toolkit() -> None:
    model, q = Mlp().eval(), Quantizer(preset="plain", backend="openvino")
    proxy = q.calibrate(model, [torch.randn(4, 32)])
    names = {name.rpartition(".")[2] for name, _ in proxy.named_modules()}
    assert {"_input_quantizer", "_weight_quantizer"} <= names
    assert all(row.amax is not None for row in q.ranges)


class _Counting(Mlp):
    """Counts its calls, and follows the mean of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Mlp, _Counting, ConvNet])
def test_a_model_is_what_it_was_after_every_stage(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind().train()
    x = torch.randn(4, 3, 16, 16) if kind is ConvNet else torch.randn(4, 32)
    before = Snapshot.of(model)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x, x + 1])
    before.assert_unchanged(model)
    amp = q.amp(model)
    amp(x)
    q.fallback(amp, num=1)
    before.assert_unchanged(model)
    q.quantize(model)(x)
    q.simulate(model)(x)
    q.for_backend("tensorrt-rtx").quantize(model)(x)
    q.save(tmp_path / "saved")
    Quantizer.load(tmp_path / "saved").quantize(model)(x)
    before.assert_unchanged(model)


@pytest.mark.parametrize("kind", [Mlp, ConvNet])
def test_a_frozen_model_does_not_move_with_the_float_one(kind: type[nn.Module]) -> None:
    model = kind().eval()
    x = torch.randn(4, 3, 16, 16) if kind is ConvNet else torch.randn(4, 32)
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [x])
    quantized = q.quantize(model)
    with torch.no_grad():
        expected = quantized(x)
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.25)
        assert torch.equal(quantized(x), expected)
