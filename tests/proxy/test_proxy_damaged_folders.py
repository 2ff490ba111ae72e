"""Folders of ``save()`` that were damaged or edited: refused with the place in the file, never another plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError, QuantizerError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(_model(), [torch.randn(4, 16)], progress=False)
    return q.save(tmp_path / "saved")


def _edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = folder / "quantizer.yaml"
    document = yaml.safe_load(file.read_text())
    change(document)
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


@pytest.mark.parametrize("name", ["ranges.safetensors", "observed.safetensors"])
def test_one_flipped_bit_of_a_tensor_is_noticed(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(QuantizerError, match=rf"{name} is damaged: .*SHA-256 differs"):
        Quantizer.load(folder)


def test_a_folder_from_before_there_were_checksums_is_read(folder: Path) -> None:
    kept = Quantizer.load(folder).scales()
    _edited(folder, lambda document: document.pop("sha256"))
    loaded = Quantizer.load(folder).scales()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)


def test_a_plan_that_is_not_utf8(folder: Path) -> None:
    (folder / "quantizer.yaml").write_bytes(b"format: 1\n\xff\xfe")
    with pytest.raises(QuantizerError, match=r"saved cannot be read: .*can't decode byte"):
        Quantizer.load(folder)


def test_a_plan_that_is_nested_too_deep_is_no_crash(folder: Path) -> None:
    (folder / "quantizer.yaml").write_text("[" * 100_000)
    with pytest.raises(QuantizerError, match="nested more than"):
        Quantizer.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["sites"][0].update(multiply_adds="many"), r"sites\[0\].multiply_adds: expected a whole number"),
        (lambda d: d["sites"][0].update(multiply_adds=-1), r"sites\[0\].multiply_adds: expected 0 or more, got -1"),
        (lambda d: d["sites"][0].update(reads=3), r"sites\[0\].reads: expected a list, got 3"),
        (lambda d: d["sites"][0].update(quantized=False), r"sites\[0\].quantized: is False, which contradicts"),
        (lambda d: d["sites"][0].update(extra=1), r"sites\[0\]: unknown field 'extra'"),
        (lambda d: d["sites"].append(d["sites"][0]), r"sites\[2\].name: .* occurs twice"),
        (
            lambda d: d["sites"][1]["operands"][0].update(axis="x"),
            r"sites\[1\].operands\[0\].axis: expected a whole number or null, got 'x'",
        ),
        (
            lambda d: d["sites"][0]["operands"][1].update(axis=None),
            r"operands\[1\].axis: None .* does not fit scales \[24\]",
        ),
        (lambda d: d["sites"][0]["operands"][1].update(dtype="int9"), r"operands\[1\].dtype: expected one of int8"),
        (lambda d: d["sites"][0]["operands"][0].update(zero_point=3), "zero_point: expected none for int8, got 3"),
        (lambda d: d["sites"][0]["operands"][1].update(view={"shape": [2], "order": [1]}), "view.order: expected"),
        (lambda d: d["sites"][0]["operands"][0].update(name="other"), "the tensor .* belongs to no operand|scale: "),
        (lambda d: d["products"][0].update(reason="none such"), r"products\[0\].reason: expected one of"),
        (
            lambda d: d["products"][0].update(site=None),
            r"products\[0\].reason: is null for an operation outside of sites",
        ),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(0, [float("inf")]), "fingerprint of the weights .* damaged"),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(0, "16"), "fingerprint of the weights .* damaged"),
        (lambda d: d["fingerprint"]["0.bias"].__setitem__(3, 10**400), "fingerprint of the weights .* damaged"),
        (lambda d: d.update(regions=7), "regions: expected an object, got 7"),
        (lambda d: d.update(fallback={"groups": 1}), "the record of a fallback is damaged: "),
        (lambda d: d.update(more=7), "unknown field 'more'"),
        (lambda d: d.update(config={"dtype": "int9"}), r"cannot be loaded: [^\0]*dtype: got"),
        (lambda d: d.update(sha256=[1]), "sha256: expected an object, got a list"),
    ],
)
def test_an_edited_plan_is_told_by_its_place(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(QuantizerError, match=message):
        Quantizer.load(_edited(folder, change))


@pytest.mark.parametrize("verb", ["quantize", "amp"])
@pytest.mark.parametrize(
    ("site", "edit", "message"),
    [
        (0, {"axis": 1}, r"0\.weight has the shape \[24, 16\], which does not fit its scales"),
        (1, {"axis": -1}, r"2\.weight has the shape \[8, 24\], which does not fit its scales"),
        (0, {"parameter": "2.weight"}, r"2\.weight has the shape \[8, 24\], which does not fit its scales"),
        (0, {"parameter": "0.weigh"}, r"another model, whose weight is '0\.weigh'; calibrate this model"),
        (1, {"parameter": "tp.weight"}, r"another model, which has a weight 'tp\.weight' .*no attribute `tp`"),
        (1, {"parameter": ".."}, r"another model, which has a weight '\.\.'"),
    ],
)
def test_an_edited_weight_is_none_of_the_model(
    folder: Path, verb: str, site: int, edit: dict[str, Any], message: str
) -> None:
    """What only the model can tell is told when there is one."""
    q = Quantizer.load(_edited(folder, lambda d: d["sites"][site]["operands"][1].update(edit)))
    with pytest.raises(QuantizerError, match=message):
        getattr(q, verb)(_model())(torch.zeros(2, 16))


def test_a_damaged_observation_changes_nothing(folder: Path) -> None:
    """Half of it would be worse than none: what was seen before counts alone."""
    _edited(folder, lambda document: document.pop("sha256"))
    tensors = load_file(folder / "observed.safetensors")
    text = bytes(tensors["document"].tolist()).replace(b'"count": 64', b'"count": -4')
    assert b'"count": -4' in text
    tensors["document"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, folder / "observed.safetensors")
    q = Quantizer.load(folder)
    with pytest.raises(QuantizerError, match=r"damaged: observed.groups\[0\].count: expected 0 or more, got -4"):
        q.calib(_model(), resume=True)


def test_a_product_of_no_site_is_refused(folder: Path) -> None:
    _edited(folder, lambda document: document.pop("sha256"))
    tensors = load_file(folder / "observed.safetensors")
    text = bytes(tensors["document"].tolist()).replace(b'"site": "0.', b'"site": "9.')
    tensors["document"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, folder / "observed.safetensors")
    with pytest.raises(QuantizerError, match=r"damaged: products of '9\..*', which is not a site"):
        Quantizer.load(folder).calib(_model(), resume=True)


@pytest.mark.parametrize("batches", [None, 3, "data", {"input": torch.zeros(2, 16)}])
def test_what_is_no_iterable_of_batches(batches: Any) -> None:
    with pytest.raises(CalibrationError, match=r"the calibration data is a .*; pass an iterable of batches"):
        Quantizer(preset="plain", backend="openvino").calibrate(_model(), batches)


class _Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # More than any address space: no system gives it, whatever it promises to others.
        return self.linear(x).expand(2**45, -1, -1).contiguous()


def test_too_little_memory_is_told_plainly() -> None:
    with pytest.raises(CalibrationError, match=r"too little memory for batch 0 .*: use smaller batches"):
        Quantizer(preset="plain", backend="openvino").calibrate(_Hungry().eval(), [torch.zeros(4, 16)], progress=False)
