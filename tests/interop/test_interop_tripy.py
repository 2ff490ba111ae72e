"""Scales for tripy's quantized ``Linear``, in its own orientation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from safetensors import safe_open
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.integrations.tripy import TripyLinear, tripy_scales, write_tripy_scales
from tests.helpers import Mlp


def _calibrated(model: nn.Module, **options: Any) -> Quantizer:
    options = {"sites": {"residual_add": False}, **options}
    return make_calibrated(
        model.eval(),
        [torch.randn(8, 32, generator=torch.Generator().manual_seed(0))],
        backend="openvino",
        activations={"calibrator": "max"},
        **options,
    )


def _as_tripy(linear: TripyLinear, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What ``nvtripy.Linear`` computes: both operands rounded, then x W^T + b."""

    def rounded(value: Tensor, scale: Tensor) -> Tensor:
        return (value / scale).round().clamp(-128, 127) * scale

    scale = linear.weight_scale
    if linear.weight_quant_dim is not None:
        assert scale.shape == (weight.shape[linear.weight_quant_dim],)
        scale = scale.unsqueeze(1 - linear.weight_quant_dim)
    return rounded(x, linear.input_scale) @ rounded(weight, scale).transpose(1, 0) + bias


class Transposed(nn.Module):
    """A linear that keeps its weight as [in, out], as ``Conv1D`` of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class OfView(Transposed):
    """A linear that keeps its weight as [out, in] and multiplies by its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize(
    ("make", "transposed"), [(lambda: nn.Linear(32, 48), False), (Transposed, True), (OfView, False)]
)
def test_tripys_formula_gives_our_output(make: Any, transposed: bool, granularity: str) -> None:
    torch.manual_seed(0)
    layer = make()
    model, x = nn.Sequential(layer), torch.randn(4, 32)
    q = _calibrated(model, weights={"granularity": granularity})
    result = tripy_scales(q.plan)
    assert list(result.linears) == ["0"]
    assert result.left == {}
    linear = result.linears["0"]
    assert linear.transposed is transposed
    assert linear.weight_quant_dim == (0 if granularity == "per_channel" else None)
    weight = layer.weight.t() if transposed else layer.weight
    torch.testing.assert_close(_as_tripy(linear, x, weight, layer.bias), q.quantize(model)(x), atol=1e-5, rtol=1e-5)


def test_conv1d_of_transformers() -> None:
    tf = pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    config = tf.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=99)
    model = tf.GPT2LMHeadModel(config).eval()
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
    q.calibrate(model, [{"input_ids": torch.arange(16).reshape(2, 8)}])
    result = tripy_scales(q.plan)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(result.linears) == [f"transformer.h.0.{name}" for name in names]
    attention = result.linears["transformer.h.0.attn.c_attn"]
    assert (attention.transposed, attention.weight_quant_dim, tuple(attention.weight_scale.shape)) == (True, 0, (96,))
    assert result.left.pop("lm_head.forward.linear_0") == "several calls read transformer.wte.weight"  # it is tied
    assert set(result.left.values()) == {"a matmul is not a Linear"}


def test_the_file(tmp_path: Path) -> None:
    q = _calibrated(Mlp())
    path = tmp_path / "scales.safetensors"
    written = write_tripy_scales(q.plan, path)
    assert sorted(written.linears) == ["down", "up"]
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["down.input_scale", "down.weight_scale", "up.input_scale", "up.weight_scale"]
        assert torch.equal(file.get_tensor("up.weight_scale"), q.scales()["up.forward.linear_0.weight"])
        assert torch.equal(file.get_tensor("up.input_scale"), q.scales()["up.forward.linear_0.input"])
        assert file.metadata() == {
            **{f"{name}.weight_quant_dim": "0" for name in ("up", "down")},
            **{f"{name}.transposed": "false" for name in ("up", "down")},
        }
    assert [entry.name for entry in tmp_path.iterdir()] == ["scales.safetensors"]


def test_what_is_no_linear_is_listed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Parameter(torch.randn(64, 32))
            self.shared, self.left = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            one, two = (nn.functional.linear(x, part) for part in self.packed.chunk(2))
            again = nn.functional.linear(self.shared(one), self.shared.weight)
            first = torch.matmul(self.left.weight, again.t())
            return first @ two

    q = _calibrated(Odd())
    left = tripy_scales(q.plan).left
    assert tripy_scales(q.plan).linears == {}
    quantized = {path for path, entry in q.plan.items() if entry.quantized}
    assert set(left) == quantized
    assert left["shared.forward.linear_0"] == "several calls read shared.weight"
    assert left["forward.matmul_0"] == "the weight is the operand 'lhs' of matmul, which is not x W^T"
    assert left["forward.matmul_1"] == "a matmul is not a Linear"


def test_codes_that_were_chosen_are_more_than_scales() -> None:
    plan = _calibrated(Mlp(), weights={"rounding": "gptq"}).plan
    chosen = [path for path, entry in plan.items() if any(operand.codes is not None for operand in entry.operands)]
    assert chosen
    left = tripy_scales(plan).left
    assert all(
        left[path].endswith("has learned integers (weights.rounding), which tripy scales cannot represent")
        for path in chosen
    )


@pytest.mark.parametrize("place", ["missing/scales.safetensors", "."])
def test_a_file_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match="cannot write"):
        write_tripy_scales(_calibrated(Mlp()).plan, tmp_path / place)
    assert not list(tmp_path.iterdir())


def test_without_a_quantized_linear() -> None:
    q = _calibrated(Mlp(), sites={"linear": False, "residual_add": True})
    with pytest.raises(QuantizerError, match="no quantized site of the plan can be a tripy Linear"):
        write_tripy_scales(q.plan, "scales.safetensors")
