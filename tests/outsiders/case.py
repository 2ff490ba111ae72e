"""One model of the corpus, what it must reach, and the way through calibration, file and engine that checks it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import nn
from torch.utils import _pytree as pytree

from quantizer import Quantizer
from quantizer.common.structure import leaves
from quantizer.engines import BuildOptions
from quantizer.engines import build_engine
from quantizer.engines import load_engine
from quantizer.engines.inspection.inspect_engine import inspect_file
from quantizer.errors import QuantizerError
from quantizer.graph_check import check_file
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.engine_module import EngineModule
from tests.helpers import BYTE_PRODUCTS_ARE_EXACT
from tests.helpers import Snapshot

__all__ = ["BACKENDS", "Case", "Reached", "check", "noise", "reach", "smooth", "sqnr"]

BACKENDS = ("openvino", "onnxruntime", "torch")

_SEVEN_BITS_DB = 7.0
"""A CPU without VNNI has weights of 7 bits, which is 6 dB, and one dB of luck."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and what every engine of it must reach.

    Attributes:
        net: makes the float model.
        batch: makes the arguments of one call for a number of samples: a tensor, a tuple or a mapping.
        sqnr: the least SQNR of the outputs from those of the float model, in dB, at each number of samples.
        integer: the least share of multiply-adds in integers, 0 to 1.
        by_backend: other values of ``sqnr`` and ``integer`` for a backend, each with its reason in a comment.
        rows: the numbers of samples to call the engine with.
        example_rows: samples of a batch of the calibration, and of the example that is exported.
        batches: batches of the calibration.
        backends: the backends that take it.
        config: keys of the ``quantizer`` section.
        faults: what still goes wrong, by backend: such a case is expected to fail until it is mended.
        error: pattern of the error that quantizing it must raise, where no engine can be had.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    sqnr: float = 30.0
    integer: float = 0.9
    by_backend: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rows: tuple[int, ...] = (1, 2, 3, 5, 8)
    example_rows: int = 8
    batches: int = 32
    backends: tuple[str, ...] = BACKENDS
    config: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    def least(self, backend: str, figure: str) -> float:
        """Return the least ``sqnr`` or ``integer`` of a backend."""
        least = float(self.by_backend.get(backend, {}).get(figure, getattr(self, figure)))
        return least - _SEVEN_BITS_DB if figure == "sqnr" and not BYTE_PRODUCTS_ARE_EXACT else least


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What an engine of a case reaches.

    Attributes:
        frozen: SQNR of the quantized PyTorch model in dB, by the number of samples.
        engine: SQNR of the engine in dB, by the number of samples.
        integer: share of multiply-adds in integers; None: the engine has no products.
        findings: errors that the check of the file found.
    """

    frozen: Mapping[int, float]
    engine: Mapping[int, float]
    integer: float | None
    findings: tuple[str, ...]


def noise(*shape: int) -> Tensor:
    """Return normal values without tails: one rare value beyond the calibrated range would be all of the error."""
    return torch.randn(*shape).clamp(-2.5, 2.5)


def smooth(x: Tensor) -> Tensor:
    """Return noise with the spectrum of pictures or signals: neighbours alike, the variance about 1."""
    pool = {1: nn.functional.avg_pool1d, 2: nn.functional.avg_pool2d, 3: nn.functional.avg_pool3d}[x.dim() - 2]
    return pool(x, 5, 1, 2) * 5 ** ((x.dim() - 2) / 2)


def reach(case: Case, backend: str, folder: Path) -> Reached:
    """Quantize a case for a backend, build its engine, and measure it at each number of samples.

    Raises:
        QuantizerError: quantizing or building it failed.
        AssertionError: the user's model or data were changed.
    """
    torch.manual_seed(0)
    model = case.net().eval()
    batches = [case.batch(case.example_rows) for _ in range(case.batches)]
    before, data = Snapshot.of(model), copy.deepcopy(batches)
    quantizer = Quantizer(backend=backend, **{"preset": "plain", **case.config})
    quantizer.calibrate(model, batches, progress=False)
    frozen = quantizer.quantize(model)
    file = folder / "model.onnx"
    quantizer.export(frozen, file, batches[0])
    findings = [found for found in check_file(file, backend) if found.severity == "error"]
    # Without a compiler: Inductor takes half a minute, and computes the same graph.
    build_engine(backend, file, folder / "model.engine", BuildOptions(compiled=False))
    by_rows = {rows: case.batch(rows) for rows in case.rows}
    right = {rows: _call(model, batch) for rows, batch in by_rows.items()}
    engine = EngineModule(load_engine(backend, folder / "model.engine"), CallForm.of(model, right[case.rows[0]]))
    reached = Reached(
        frozen={rows: sqnr(right[rows], _call(frozen, batch)) for rows, batch in by_rows.items()},
        engine={rows: sqnr(right[rows], _call(engine, batch)) for rows, batch in by_rows.items()},
        integer=inspect_file(folder / "model.engine", backend).low_share(),
        findings=tuple(map(str, findings)),
    )
    before.assert_unchanged(model)
    same = pytree.tree_map(lambda a, b: not isinstance(a, Tensor) or torch.equal(a, b), batches, data)
    assert all(pytree.tree_leaves(same)), "the user's data was changed"
    return reached


def check(case: Case, backend: str, folder: Path) -> None:
    """Hold a case to its figures."""
    if case.error is not None:
        with pytest.raises(QuantizerError, match=case.error):
            reach(case, backend, folder)
        return
    reached = reach(case, backend, folder)
    assert not reached.findings
    least = case.least(backend, "sqnr")
    assert all(found >= least for found in reached.frozen.values()), f"frozen model: {reached.frozen}, least {least}"
    assert all(found >= least for found in reached.engine.values()), f"engine: {reached.engine}, least {least}"
    assert (reached.integer or 0.0) >= case.least(backend, "integer"), f"share in integers: {reached.integer}"


def _call(model: nn.Module, batch: Any) -> Any:
    """Return the output of a call on a copy of the batch, without gradients."""
    batch = copy.deepcopy(batch)
    with torch.no_grad():
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


def _floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, those of a dataclass too."""
    if hasattr(output, "__dataclass_fields__") and not isinstance(output, Mapping):
        output = {name: getattr(output, name) for name in output.__dataclass_fields__}
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def sqnr(right: Any, found: Any) -> float:
    """Return the least SQNR of two outputs' tensors in dB: power of the right values over that of the error."""
    pairs = list(zip(_floats(right), _floats(found), strict=True))
    assert [one.shape for one, _ in pairs] == [other.shape for _, other in pairs]
    return min(_decibels(one.double(), other.double()) for one, other in pairs)


def _decibels(right: Tensor, found: Tensor) -> float:
    error = float((right - found).square().sum())
    power = float(right.square().sum())
    return math.inf if error == 0 else -math.inf if power == 0 else 10 * math.log10(power / error)
