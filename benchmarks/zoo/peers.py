"""What ours and other tools make of the same tiny model: whether they take it, and how much of it they round.

Each as its manual says for INT8: ``INT8_DEFAULT_CFG`` of Model Optimizer, with the vision branches that it leaves out
by their names; ``nncf.quantize`` of a torch model. Each sees the two batches that ours sees. A tool takes a model if
what it returns runs, and what was finite still is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from guess import said
from rounded import RoundedShare
from torch import Tensor, nn
from zoo_models import subjects
from zoo_steps import run

from quantizer import Quantizer

__all__ = ["STAGES", "TOOLS", "taken"]

STAGES = ("made", "quantized", "ran")
"""Each is "ok" or a reason, and nothing where one before it failed."""

_LEFT_OUT = ("*vision_tower*", "*vision_model*", "*visual*", "*embed_vision*", "*multi_modal_projector*")
"""Names that Model Optimizer leaves in float by default, for the sake of large multimodal models."""

Batches = list[dict[str, Tensor]]
Tell = Callable[[str, Any], None]


def taken(key: str, tell: Tell) -> None:
    """Tell what the tool of a key, ``TOOL.SUBJECT``, makes of its subject, and the share of it that is rounded."""
    tool, _, name = key.partition(".")
    subject = next(subject for subject in subjects() if subject.key == name)
    counter = RoundedShare()

    def stages() -> Iterator[str]:
        made = subject.made()
        batches = [made.batch(seed) for seed in (0, 1)]
        expected = run(made.model, batches[0])
        yield "made"
        quantized = TOOLS[tool](made.model, batches, tell)
        yield "quantized"
        with counter.counting():
            given = run(quantized, batches[0])
        _require_finite(given, expected)
        yield "ran"

    steps = stages()
    for stage in STAGES:
        tell("stage", stage)
        try:
            next(steps)
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is the row's reason
            tell(stage, said(error))
            return
        tell(stage, "ok")
    tell("share", counter.share)
    tell("multiply_adds", counter.multiply_adds)


def _require_finite(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if not given:
        raise AssertionError("no outputs")
    wrong = [
        name
        for name, value in given.items()
        if not value.isfinite().all() and (name not in expected or expected[name].isfinite().all())
    ]
    if wrong:
        raise AssertionError(f"values that are not finite in {', '.join(wrong[:3])}")


def _ours(model: nn.Module, batches: Batches, tell: Tell) -> nn.Module:
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, batches, progress=False)
    tell("coverage_share", quantizer.coverage.share)
    return quantizer.quantize(model)


def _model_optimizer(model: nn.Module, batches: Batches, tell: Tell) -> nn.Module:
    import modelopt.torch.quantization as mtq

    def calibrate(quantized: nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                quantized(**batch)

    config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    config["quant_cfg"] = [entry for entry in config["quant_cfg"] if entry["quantizer_name"] not in _LEFT_OUT]
    result: nn.Module = mtq.quantize(model, config, calibrate)
    return result


def _nncf(model: nn.Module, batches: Batches, tell: Tell, **options: Any) -> nn.Module:
    import nncf

    # The first one compiles an extension, which takes longer than NNCF waits for by itself.
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")
    result: nn.Module = nncf.quantize(model, nncf.Dataset(batches), **options)
    return result


def _nncf_transformer(model: nn.Module, batches: Batches, tell: Tell) -> nn.Module:
    import nncf

    return _nncf(model, batches, tell, model_type=nncf.ModelType.TRANSFORMER)


TOOLS: dict[str, Callable[[nn.Module, Batches, Tell], nn.Module]] = {
    "quantizer": _ours,
    "modelopt": _model_optimizer,
    "nncf": _nncf,
    "nncf-transformer": _nncf_transformer,
}
"""Each quantizes a model, in place or not, with two batches."""
