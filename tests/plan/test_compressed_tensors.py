"""Checkpoints in the format of compressed-tensors: names, shapes, types and metadata. The library: tests/clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers", reason="checkpoints are those of transformers: install enginequant[hf]")

from compressed_kinds import KINDS, inputs, quantized
from helpers import batch, read_json, tiny

import quantizer
from quantizer import Quantizer, QuantizerConfig
from quantizer.errors import QuantizerError
from quantizer.plan.compressed_tensors import compressed_checkpoint, is_compressed, write_compressed_tensors
from quantizer.proxy.build import sites_of

QUERY = "bert.encoder.layer.0.attention.self.query"
INT8, PACKED = {"weight": torch.int8, "weight_scale": torch.float32}, {"weight_packed": torch.int32}
FP8 = {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}
STATIC = {"input_scale": torch.float32}
FORMATS: dict[str, tuple[str, dict[str, torch.dtype]]] = {
    "symmetric": ("int-quantized", {**INT8, **STATIC}),
    "zero points": ("int-quantized", {**INT8, **STATIC, "input_zero_point": torch.int8}),
    "one scale": ("int-quantized", {**INT8, **STATIC}),
    "fp8": ("float-quantized", {**FP8, **STATIC}),
    "dynamic": ("int-quantized", INT8),
    "int8 weights": ("pack-quantized", {**PACKED, "weight_scale": torch.float32, "weight_shape": torch.int64}),
    "fp8 weights": ("naive-quantized", FP8),
    "mixed": ("mixed-precision", {**PACKED, "weight_scale": torch.float32, "weight_shape": torch.int64}),
}
"""The format of each kind, and the tensors of its first layer."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_and_the_config(kind: str, tmp_path: Path) -> None:
    model, frozen, q = quantized(kind)
    written = write_compressed_tensors(model, frozen, q.plan, tmp_path)
    assert not written.left
    document = read_json(tmp_path / "config.json")
    config = document["quantization_config"]
    name, types = FORMATS[kind]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", name)
    assert document["architectures"] == ["BertForSequenceClassification"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {key.removeprefix(f"{QUERY}."): tensors[key].dtype for key in tensors if key.startswith(QUERY)} == {
        **types,
        "bias": torch.float32,
    }
    # All linear layers are in a group or ignored.
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears == {*written.linears, *config["ignore"]}
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    assert set(targets) == {"Linear"} if len(config["config_groups"]) == 1 else set(targets) == set(written.linears)
    assert is_compressed(tmp_path)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """The integers of words, lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    codes = (words.long()[..., None] >> shifts) & (2**bits - 1)
    return (codes.flatten(1)[:, :columns] - 2 ** (bits - 1)).to(torch.int8)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_scales_are_those_of_the_frozen_proxy(kind: str) -> None:
    model, frozen, q = quantized(kind)
    tensors = compressed_checkpoint(model, frozen, q.plan).tensors
    compared = 0
    for site in sites_of(frozen):
        if not q.plan[site.path].quantized:
            continue
        host, weight, data = site.host_path, site.quantizer_of("weight"), site.quantizer_of("input")
        assert weight.stored is not None
        assert weight.scale is not None
        if f"{host}.weight_packed" in tensors:
            bits, columns = 4 if weight.dtype == "int4" else 8, weight.stored.shape[1]
            assert tensors[f"{host}.weight_shape"].tolist() == list(weight.stored.shape)
            codes = unpacked(tensors[f"{host}.weight_packed"], bits, columns)
        else:
            codes = tensors[f"{host}.weight"]
        assert torch.equal(codes.float(), weight.stored.float())
        scale = tensors[f"{host}.weight_scale"]
        assert scale.shape == ((1,) if weight.axis is None else (len(codes), scale.shape[1]))
        assert torch.equal(scale.flatten(), weight.scale.flatten())
        if f"{host}.input_scale" in tensors:
            assert torch.equal(tensors[f"{host}.input_scale"], data.scale.reshape(1))  # type: ignore[union-attr]
        if f"{host}.input_zero_point" in tensors:
            assert data.zero_point is not None
            assert int(tensors[f"{host}.input_zero_point"]) == int(data.zero_point) - 128
        compared += 1
    assert compared >= 13


def test_a_corrected_bias_is_the_sum() -> None:
    model, frozen, q = quantized("zero points")
    tensors = compressed_checkpoint(model, frozen, q.plan).tensors
    shifts = {site.host_path: site.bias_shift for site in sites_of(frozen) if site.bias_shift is not None}
    assert shifts
    for host, shift in shifts.items():
        bias = model.get_submodule(host).bias
        assert isinstance(bias, Tensor)
        assert torch.equal(tensors[f"{host}.bias"], bias.detach() + shift)


def test_one_range_per_token_instead_of_those_of_the_plan() -> None:
    model, frozen, q = quantized("zero points")
    checkpoint = compressed_checkpoint(model, frozen, q.plan, dynamic=True)
    assert not any("input" in name and QUERY in name for name in checkpoint.tensors)
    inputs = checkpoint.config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"], inputs["symmetric"]) == ("token", True, False)


def test_blocks_at_run_time() -> None:
    model = nn.Sequential(nn.Linear(128, 16))
    settings = QuantizerConfig(preset="plain", backend="openvino", activations={"ranges": "dynamic"})
    q = Quantizer(settings)
    q.calibrate(model, [torch.randn(4, 128)], progress=False)
    config = compressed_checkpoint(model, q.quantize(model), q.plan).config
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", 128, True)


def test_the_code_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "serve-with.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S) if "write_compressed" in block)
    monkeypatch.chdir(tmp_path)
    model = tiny("bert-classification")
    exec(code, {"quantizer": quantizer, "model": model, "batches": [inputs()]})
    config = read_json(tmp_path / "my-model-fp8" / "config.json")["quantization_config"]
    assert config["format"] == "float-quantized"


# -- what the format cannot express ------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Layers that the format has no form for, and one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.plain, self.read, self.first = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.first.weight
        self.table = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.plain(x) + self.again(self.first(x))
        x = self.read(x) + self.read.weight.sum()
        return (x @ self.table) @ x.transpose(1, 2)


def calibrated(model: nn.Module, data: Any, **options: Any) -> Quantizer:
    q = Quantizer(QuantizerConfig(**{"preset": "plain", "backend": "openvino", **options}))
    q.calibrate(model, data, progress=False)
    return q


def test_what_stays_in_floating_point_has_a_reason() -> None:
    torch.manual_seed(0)
    model = Odd().eval()
    q = calibrated(model, [torch.randn(2, 8, 16)])
    checkpoint = compressed_checkpoint(model, q.quantize(model), q.plan)
    assert checkpoint.linears == ("plain",)
    assert set(checkpoint.config["ignore"]) == {"read", "first", "again"}
    reasons = {path.partition(".")[0]: reason for path, reason in checkpoint.left.items()}
    assert reasons["conv"] == "a site of kind conv is not a linear layer"
    assert reasons["first"] == "its weight is shared with another module"
    assert reasons["again"] == "its weight is not the parameter of its layer"
    assert reasons["read"].startswith("its weight is also read in ")
    of_table = "its weight belongs to Odd, and the format describes torch.nn.Linear alone"
    assert of_table in checkpoint.left.values()
    for name in ("conv", "first", "again", "read"):
        assert torch.equal(checkpoint.tensors[f"{name}.weight"], model.state_dict()[f"{name}.weight"])


def test_factors_of_smoothquant_are_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    x = torch.randn(64, 16)
    x[:, 0] *= 50
    q = calibrated(model, [x, x + 1], activations={"smoothquant_alpha": 0.5})
    with pytest.raises(
        QuantizerError, match=r"no quantized linear layer can .*: 0\..* factors of SmoothQuant or AWQ, .*"
    ):
        compressed_checkpoint(model, q.quantize(model), q.plan)


def test_another_proxy_is_refused() -> None:
    model, _, q = quantized("symmetric")
    for proxy in (q.amp(model), model):
        with pytest.raises(QuantizerError, match="is not the result of quantize"):
            compressed_checkpoint(model, proxy, q.plan)


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    q = calibrated(model, [torch.randn(4, 16)])
    with pytest.raises(QuantizerError, match=r"Sequential is not a transformers model, so it has no config\.json"):
        write_compressed_tensors(model, q.quantize(model), q.plan, tmp_path)


def test_a_float_plan_is_refused() -> None:
    model = tiny("bert-classification")
    q = calibrated(model, [batch("bert-classification")], exclude={"names": ["**"]})
    with pytest.raises(QuantizerError, match=r"no quantized linear layer can .*: the plan quantizes nothing"):
        compressed_checkpoint(model, q.quantize(model), q.plan)


def test_other_folders_are_not_of_this_format(tmp_path: Path) -> None:
    assert not is_compressed(tmp_path)
    for text in ("{", "[]", "{}", '{"quantization_config": {"quant_method": "gptq"}}'):
        (tmp_path / "config.json").write_text(text)
        assert not is_compressed(tmp_path)
