"""Checkpoints of ``plan/compressed_tensors.py``, loaded by that library through transformers: ``make clients``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="checkpoints are those of transformers: install enginequant[hf]")

from client_environment import client_prints
from compressed_kinds import KINDS, inputs, quantized

from quantizer.plan.compressed_tensors import write_compressed_tensors
from quantizer.proxy.build import sites_of

pytestmark = pytest.mark.nightly

LOAD = """\
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoConfig, AutoModelForSequenceClassification

# The library itself, which refuses unknown keys in a group.
QuantizationConfig.model_validate(AutoConfig.from_pretrained("checkpoint").quantization_config)
model = AutoModelForSequenceClassification.from_pretrained(
    "checkpoint", dtype=torch.float32, attn_implementation="eager"
).eval()
layers = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
stored = {name: module.state_dict() for name, module in layers.items()}
weights = {
    name: BaseCompressor.get_value_from_registry(module.quantization_scheme.format).decompress(
        stored[name], module.quantization_scheme
    )["weight"]
    for name, module in layers.items()
}
with torch.no_grad():
    logits = model(**torch.load("inputs.pt")).logits
torch.save({"stored": stored, "weights": weights, "logits": logits}, "loaded.pt")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_loads_equal_integers_and_scales(kind: str, tmp_path: Path) -> None:
    model, frozen, quantizer = quantized(kind)
    written = write_compressed_tensors(model, frozen, quantizer.plan, tmp_path / "checkpoint")
    torch.save(inputs(), tmp_path / "inputs.pt")
    client_prints("compressed_tensors", LOAD, tmp_path)
    loaded = torch.load(tmp_path / "loaded.pt")
    assert set(loaded["weights"]) == set(written.linears)
    for site in sites_of(frozen):
        if site.host_path not in written.linears:
            continue
        tensors, weight, data = (
            loaded["stored"][site.host_path],
            site.quantizer_of("weight"),
            site.quantizer_of("input"),
        )
        assert weight.stored is not None
        assert weight.scale is not None
        if "weight" in tensors:
            assert tensors["weight"].dtype == weight.stored.dtype
            assert torch.equal(tensors["weight"].float(), weight.stored.float())
        assert torch.equal(tensors["weight_scale"].flatten(), weight.scale.flatten())
        # What its kernel computes with; packed integers are compared through it.
        assert torch.equal(loaded["weights"][site.host_path], weight.dequantized())
        if data.scale is not None:
            assert torch.equal(tensors["input_scale"], data.scale.reshape(1))
            zero_point = 0 if data.zero_point is None else int(data.zero_point) - 128
            assert int(tensors.get("input_zero_point", torch.tensor([0]))) == zero_point
    with torch.no_grad():
        expected = frozen(**inputs()).logits
    noise = float(((expected - loaded["logits"]) ** 2).sum())
    decibels = math.inf if noise == 0 else 10 * math.log10(float((expected**2).sum()) / noise)
    # All quantized sites are linear layers here, so nothing but the order of sums may differ.
    assert decibels >= 60, f"{decibels:.1f} dB"
