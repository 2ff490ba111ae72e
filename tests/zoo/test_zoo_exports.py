"""Which models of the zoo go on, what the page says of them, and the count of rounded multiply-adds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "zoo"))

from choose import chosen
from page_sections import exports_section, tools_section
from rounded import RoundedShare

from quantizer import Quantizer


def rows(**counts: int) -> list[dict[str, Any]]:
    """Samples of models that run, so many of each modality."""
    return [
        {"name": f"{modality}{number:02}", "library": "transformers", "built": "ok", "modality": modality}
        for modality, count in counts.items()
        for number in range(count)
    ]


def test_some_of_each_modality_are_chosen() -> None:
    known = [*rows(text=60, vision=30, sound=2, series=6), {"name": "broken", "library": "timm", "built": "no"}]
    found = chosen(known, many=30)
    counts = Counter(name.rstrip("0123456789") for name in found)
    assert len(found) == 30
    assert counts["sound"] == 2
    assert counts["series"] == 3
    assert counts["text"] == 2 * counts["vision"] + 1
    assert chosen(list(reversed(known)), many=30) == found


def test_one_more_row_changes_one_choice() -> None:
    former = set(chosen(rows(text=60, vision=30), many=30))
    assert len(former - set(chosen(rows(text=61, vision=30), many=30))) <= 1


def test_fewer_are_chosen_whole() -> None:
    assert chosen(rows(text=2, vision=1)) == ["text00", "text01", "vision00"]


def test_sections_count_among_those_that_could() -> None:
    fine = {"float_export": "ok", "export": "ok", "check": "ok", "onnxruntime": "ok", "onnxruntime_db": 140.2}
    measured = [
        {"name": "bert", "library": "transformers", "made": "ok", **fine, "float_build": "ok", "build": "ok"}
        | {"warnings": ["half of it"]},
        {"name": "vit", "library": "timm", "made": "ok", "float_export": "no such operator", "stage": "float_export"},
        {"name": "t5", "library": "transformers", "made": "ok", **fine, "stage": "openvino", "ended": "not done"},
    ]
    text = "\n".join(exports_section(measured))
    assert "| the float model is exported | 2 | 3 |" in text
    assert "| OpenVINO runs it | 0 | 2 |" in text
    assert "| TensorRT-RTX builds the quantized file (sm89) | 1 | 1 |" in text
    assert "| ok | ok | ok | 140 dB | - | ok | ok |" in text
    assert "Warnings of `quantizer check`:\n\n| what | reason |\n|---|---|\n| bert | half of it |" in text
    assert "| t5 | openvino: not done |\n| timm vit | float_export: no such operator |" in text


def test_tools_are_compared_by_what_they_take() -> None:
    def row(tool: str, name: str, **facts: Any) -> dict[str, Any]:
        return {"tool": tool, "name": name, "library": "transformers", **facts}

    measured = [row("quantizer", name, ran="ok", share=1.0) for name in ("bert", "vit")]
    measured += [row("nncf", "bert", ran="ok", share=0.9), row("nncf", "vit", quantized="ValueError: no")]
    text = "\n".join(tools_section(measured))
    assert "| this package | 2 | 2 | 100.0% | 100.0% | 2 |" in text
    assert "| NNCF | 1 | 2 | 90.0% | 90.0% | 0 |" in text
    assert "| NNCF, vit | quantized: ValueError: no |" in text


def test_there_are_no_sections_without_rows() -> None:
    assert exports_section([]) == tools_section([]) == []


class Attention(nn.Module):
    """Two products of one operand each in a layer, and one of two activations through views."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.query(x), self.key(x).transpose(1, 2))


def counted(model: nn.Module, x: Tensor) -> RoundedShare:
    """What a pass counts."""
    counter = RoundedShare()
    with torch.no_grad(), counter.counting():
        model(x)
    return counter


def test_the_share_of_ours_is_that_of_its_coverage() -> None:
    x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1))
    for exclude, share in (([], 1.0), (["key"], 2 / 3)):
        model = Attention()
        quantizer = Quantizer(preset="plain", backend="openvino", exclude={"names": exclude})
        quantizer.calibrate(model, [(x,), (x,)], progress=False)
        found = counted(quantizer.quantize(model), x)
        assert found.share == pytest.approx(share)
        assert quantizer.coverage.share == pytest.approx(share)
        assert found.multiply_adds == 3 * 2 * 32**3
    assert counted(Attention(), x).share == 0.0


class Rounded(nn.Module):
    """One product, of operands that a test makes."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
        return self.change(rounded) @ rounded.t()


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda value: value, 1.0),
        (lambda value: (value.reshape(4, 16).reshape(8, 8) * 0.5).flip(0), 1.0),
        (lambda value: torch.cat([value[:4], value[4:]]), 1.0),
        (lambda value: value + 0.1, 0.0),
        (lambda value: value * value, 0.0),
        (lambda value: value.clone().add_(0.1), 0.0),
        (lambda value: torch.cat([value[:4], torch.rand(4, 8)]), 0.0),
    ],
)
def test_what_stays_rounded(change: Any, share: float) -> None:
    assert counted(Rounded(change), torch.randn(8, 8)).share == share
