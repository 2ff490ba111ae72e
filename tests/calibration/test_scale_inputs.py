"""``weights.rounding: awq``: which channels are scaled, what it gains, and where there are no factors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import batch, tiny
from torch import Tensor, nn
from torch.nn import functional as F
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.algorithms import algorithm as progress
from quantizer.errors import CalibrationError
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import OperandPlan

INT4 = {"weights": "int4", "activations": "float", "block_size": 16}
GAIN_DB = 2.0
"""What it adds at least to the SQNR of the output, on rows of the same kind; measured: 3 to 5."""


class Net(nn.Module):
    """A normalization that linears read, and a gate before another: [rows, 32] to [rows, 32]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48, bias=False), nn.Linear(48, 32)
        with torch.no_grad():
            self.norm.weight[3] = 40.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


def data(batches: int = 3, rows: int = 64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) for _ in range(batches)]


def scaled(model: nn.Module, batches: list[Any] | None = None, **config: Any) -> Quantizer:
    given = {"backend": "onnxruntime", "formats": [INT4], "weights": {"rounding": "awq"}, **config}
    return make_calibrated(model.eval(), data() if batches is None else batches, **given)


def operand(q: Quantizer, site: str, name: str) -> OperandPlan:
    return next(entry for entry in q.plan[f"{site}.forward.linear_0"].operands if entry.name == name)


@torch.no_grad()
def sqnr_db(model: nn.Module, q: Quantizer, x: Tensor) -> float:
    expected, found = model(x), q.quantize(model)(x)
    return 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))


def test_the_output_comes_nearer_to_the_float_one() -> None:
    model, x = Net().eval(), data(1, seed=7)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    usual = sqnr_db(model, scaled(model, weights={"rounding": "nearest"}), x)
    assert sqnr_db(model, scaled(model), x) > usual + GAIN_DB
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_reads_one_tensor_shares_its_factors() -> None:
    q = scaled(Net())
    factors = operand(q, "gate", "input").smooth
    assert factors is not None
    # The channel of large inputs has the largest factor.
    assert int(factors.argmax()) == 3
    for site, name in (("gate", "weight"), ("up", "input"), ("up", "weight")):
        other = operand(q, site, name).smooth
        assert other is not None
        assert torch.equal(factors, other)
    reason = q.plan["gate.forward.linear_0"].reason
    assert "SmoothQuant 0." in reason
    assert "weight: awq, alpha 0." in reason


def test_factors_are_of_float_inputs_without_padding() -> None:
    def tokens() -> nn.Module:
        torch.manual_seed(0)
        return net(
            "self.layer(self.table(input_ids)) * attention_mask[..., None]",
            "input_ids, attention_mask",
            table=nn.Embedding(50, 32),
            layer=linear(),
        )

    ids, mask = torch.randint(1, 50, (6, 40)), torch.ones(6, 40, dtype=torch.int64)
    short = {"input_ids": ids, "attention_mask": mask}
    long = {"input_ids": F.pad(ids, (0, 24), value=49), "attention_mask": F.pad(mask, (0, 24))}
    config = {"exclude": {"module_types": ["Embedding"]}}
    plain, padded = (operand(scaled(tokens(), [one], **config), "layer", "input").smooth for one in (short, long))
    assert plain is not None
    assert padded is not None
    torch.testing.assert_close(plain, padded)


def test_a_file_computes_it_without_another_multiplication(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    ort = pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")
    model, x = Net().eval(), data(1, rows=20, seed=7)[0]
    q = scaled(model)
    frozen = q.quantize(model)
    path = q.export(frozen, tmp_path / "awq.onnx", {"x": x})
    usual = scaled(model, weights={"rounding": "nearest"})
    plain = usual.export(usual.quantize(model), tmp_path / "nearest.onnx", {"x": x})
    # One factor goes into the normalization, the other one through the gate into a weight with scales of blocks.
    assert [node.op_type for node in onnx.load(path).graph.node] == [n.op_type for n in onnx.load(plain).graph.node]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        expected = frozen(x)
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-4 * float(expected.abs().max()))


# -- where there are no factors ------------------------------------------------------------------------------------


def test_an_input_that_is_rounded_is_left_to_smoothing() -> None:
    q = scaled(Net(), formats=[])
    assert operand(q, "gate", "input").smooth is None
    assert "weight: not scaled by awq: its input is also quantized" in q.plan["gate.forward.linear_0"].reason


def test_a_convolution_has_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    q = scaled(model, [torch.randn(4, 3, 8, 8) for _ in range(2)], formats=[{**INT4, "block_size": None}])
    (reason,) = [entry.reason for entry in q.plan.values() if entry.quantized]
    assert "weight: not scaled by awq: the channels of its input are not the last axis" in reason


def test_inputs_of_one_size_gain_nothing() -> None:
    model = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(16))
    q = scaled(model, [torch.eye(16) for _ in range(2)])
    (reason,) = [entry.reason for entry in q.plan.values()]
    assert "weight: not scaled by awq: no factors reduce the error" in reason


def test_several_processes_do_not_share_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = scaled(Net())
    monkeypatch.setattr(progress, "get_world_size", lambda: 2)
    monkeypatch.setattr(ReplayBatches, "on_every_rank", False)
    with pytest.raises(CalibrationError, match=r"weights\.rounding: awq needs all inputs of a weight"):
        _ = q.plan


def test_a_transformer_is_scaled() -> None:
    model = tiny("bert")
    batches = [batch("bert", seed=seed, rows=12, length=16) for seed in range(2)]
    q = scaled(model, batches, formats=[{**INT4, "block_size": None}])
    texts = [entry.reason for entry in q.plan.values() if entry.kind == "linear" and entry.quantized]
    assert texts
    assert all("weight: awq, alpha" in text or "no factors reduce the error" in text for text in texts)
