"""One model of the corpus, what it must reach, and the way through calibration, file and engine that checks it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.engines.backends import inspect_engine
from quantizer.engines.base import InputSizes
from quantizer.errors import QuantizerError
from quantizer.pipeline.engine_module import CallForm, EngineModule
from quantizer.utils.structure import leaves
from tests.helpers import BYTE_PRODUCTS_ARE_EXACT, Snapshot

BACKENDS = ("openvino", "onnxruntime", "torch")

SPEEDS = {"fused": 1.0, "converted": 2.0, "scattered": math.inf}
"""Speed classes: the most layers that only quantize, dequantize or cast, for each product of the engine.

A class is read off the layers that the engine reports, never timed. ``fused``: each product has at most one pass over
memory to convert values, so what lies between products is part of their kernels. ``converted``: one before and one
behind, which is what an operator in float between two products costs. ``scattered``: more, which is worth a look.
"""

_USUAL_SPEED = {"onnxruntime": "converted"}
"""ONNX Runtime has few activations in its integer kernels: the others dequantize and quantize again. Others: fused."""

_CONFIG: Mapping[str, Any] = {"preset": "plain", "activations": {"calibrator": "max"}}
"""Nothing that was calibrated is clipped: the error is that of the rounding, and alike at every size."""

_SEVEN_BITS_DB = 7.0
"""A CPU without VNNI has weights of 7 bits, which is 6 dB, and one dB of luck."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and what every engine of it must reach.

    What is measured are samples of the calibration: no value lies far beyond the calibrated ranges, so that a low
    figure is a fault of the tool and not the chance of the data. Lengths between the first and the last one are not
    calibrated, and have values of their own.

    Attributes:
        net: makes the float model.
        batch: makes the arguments of one call, a tensor, a tuple or a mapping, for a number of samples; for a number of
            samples and a length where there are ``lengths``.
        sqnr: the least SQNR of the outputs from those of the float model, in dB, at each size.
        integer: the least share of multiply-adds in integers, 0 to 1.
        speed: the worst speed class, one of ``SPEEDS``: how many layers do nothing but convert. Where it is not given,
            the usual one of the backend.
        by_backend: other ``sqnr``, ``integer`` and ``speed`` for a backend, each with its reason in a comment.
        rows: the numbers of samples to call the engine with.
        lengths: lengths of a sequence, each with all ``rows``; the calibration has the first and the last one in turn.
        example_rows: samples of a batch of the calibration; several numbers are taken in turn. The first batch is the
            example that is exported.
        batches: batches of the calibration.
        backends: the backends that take it.
        config: keys of the ``quantizer`` section.
        faults: what still goes wrong, by backend: such a case is expected to fail until it is mended.
        error: pattern of the error that quantizing it must raise, where no engine can be had.
    """

    net: Callable[[], nn.Module]
    batch: Callable[..., Any]
    sqnr: float = 30.0
    integer: float = 0.9
    speed: str | None = None
    by_backend: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: tuple[int, ...] = (1, 2, 3, 5, 8)
    lengths: tuple[int, ...] = ()
    example_rows: int | tuple[int, ...] = 8
    batches: int = 8
    backends: tuple[str, ...] = BACKENDS
    config: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    def least(self, backend: str, figure: str) -> float:
        """Return the least ``sqnr`` or ``integer`` of a backend."""
        least = float(self.by_backend.get(backend, {}).get(figure, getattr(self, figure)))
        return least - _SEVEN_BITS_DB if figure == "sqnr" and not BYTE_PRODUCTS_ARE_EXACT else least

    def most_conversions(self, backend: str) -> float:
        """Return the most layers of a backend's engine that only convert, for each product."""
        usual = self.speed or _USUAL_SPEED.get(backend, "fused")
        return SPEEDS[self.by_backend.get(backend, {}).get("speed", usual)]

    def calibration(self) -> list[_Batch]:
        """Return the batches of the calibration."""
        rows = self.example_rows if isinstance(self.example_rows, tuple) else (self.example_rows,)
        ends = (self.lengths[0], self.lengths[-1]) if self.lengths else (None,)
        sizes = [(rows[place % len(rows)], ends[place % len(ends)]) for place in range(self.batches)]
        return [_Batch(count, length, self._made(count, length)) for count, length in sizes]

    def measured(self, batches: Sequence[_Batch]) -> dict[str, Any]:
        """Return the arguments of a call at each size: samples of the calibration, where it has the length."""
        found = {}
        for length in self.lengths or (None,):
            known = [batch for batch in batches if batch.length == length]
            for rows in self.rows:
                size = str(rows) if length is None else f"{rows}x{length}"
                found[size] = _first(known, rows) if known else self._made(rows, length)
        return found

    def _made(self, rows: int, length: int | None) -> Any:
        return self.batch(rows) if length is None else self.batch(rows, length)


@dataclass(frozen=True)
class _Batch:
    """Arguments of one call, and their sizes."""

    rows: int
    length: int | None
    values: Any


def _first(batches: Sequence[_Batch], rows: int) -> Any:
    """Return the first samples of some batches as the arguments of one call."""
    taken: list[_Batch] = []
    while sum(batch.rows for batch in taken) < rows:
        taken.append(batches[len(taken)])

    def joined(*parts: Any) -> Any:
        each = zip(parts, taken, strict=True)
        if all(isinstance(part, Tensor) and part.shape[:1] == (batch.rows,) for part, batch in each):
            return torch.cat(parts)[:rows] if len(parts) > 1 else parts[0][:rows]
        return parts[0]

    return pytree.tree_map(joined, *(batch.values for batch in taken))


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What an engine of a case reaches.

    Attributes:
        frozen: SQNR of the quantized PyTorch model in dB, by the size.
        engine: SQNR of the engine in dB, by the size.
        integer: share of multiply-adds in integers; None: the engine has no products.
        findings: errors that the check of the file found.
        products: layers that multiply; a fused attention counts as its two products.
        conversions: layers that only quantize, dequantize or cast.
    """

    frozen: Mapping[str, float]
    engine: Mapping[str, float]
    integer: float | None
    findings: tuple[str, ...]
    products: int
    conversions: int


def noise(*shape: int) -> Tensor:
    """Return normal values without tails: one rare value beyond the calibrated range would be all of the error."""
    return torch.randn(*shape).clamp(-2.5, 2.5)


def smooth(x: Tensor) -> Tensor:
    """Return noise with the spectrum of pictures or signals: neighbours alike, the variance about 1."""
    pool = {1: nn.functional.avg_pool1d, 2: nn.functional.avg_pool2d, 3: nn.functional.avg_pool3d}[x.dim() - 2]
    return pool(x, 5, 1, 2) * 5 ** ((x.dim() - 2) / 2)


def reach(case: Case, backend: str, folder: Path) -> Reached:
    """Quantize a case for a backend, build its engine, and measure it at each size.

    Raises:
        QuantizerError: quantizing or building it failed.
        AssertionError: the user's model or data were changed.
    """
    torch.manual_seed(0)
    model = case.net().eval()
    calibration = case.calibration()
    batches = [batch.values for batch in calibration]
    before, data = Snapshot.of(model), copy.deepcopy(batches)
    quantizer = Quantizer(backend=backend, **{**_CONFIG, **case.config})
    quantizer.calibrate(model, batches, progress=False)
    frozen = quantizer.quantize(model)
    file = folder / "model.onnx"
    quantizer.export(frozen, file, batches[0])
    findings = [found for found in check_file(file, backend) if found.severity == "error"]
    # Without a compiler: Inductor takes half a minute, and computes the same graph. OpenVINO compiles models of their
    # own for the usual and the least batch.
    usual = len(pytree.tree_leaves(batches[0])[0])
    opened = {"batch": (1, usual, max(usual, *case.rows))}
    build_engine(backend, file, folder / "model.engine", BuildOptions(compiled=False, dynamic=opened))
    measured = case.measured(calibration)
    right = {size: _call(model, batch) for size, batch in measured.items()}
    loaded = load_engine(backend, folder / "model.engine")
    engine = EngineModule(loaded, CallForm.of(model, next(iter(right.values())), loaded.input_names))
    sizes = {"batch": max(case.rows)} | ({"sequence": case.lengths[-1]} if case.lengths else {})
    # The times of layers are not read: one run is enough.
    inspection = inspect_engine(backend, folder / "model.engine", sizes=InputSizes(**sizes), runs=1)
    reached = Reached(
        frozen={size: sqnr(right[size], _call(frozen, batch)) for size, batch in measured.items()},
        engine={size: sqnr(right[size], _call(engine, batch)) for size, batch in measured.items()},
        integer=inspection.low_share(),
        findings=tuple(map(str, findings)),
        products=sum(share.products for share in inspection.shares) + inspection.attention_fused,
        conversions=inspection.quantizers + inspection.casts,
    )
    before.assert_unchanged(model)
    same = pytree.tree_map(lambda a, b: not isinstance(a, Tensor) or torch.equal(a, b), batches, data)
    assert all(pytree.tree_leaves(same)), "the user's data was changed"
    return reached


def faults_of(case: Case, backend: str, reached: Reached) -> list[str]:
    """Return where an engine falls short of the figures of its case, in words."""
    least, share, most = (case.least(backend, "sqnr"), case.least(backend, "integer"), case.most_conversions(backend))
    found = list(reached.findings)
    found += [f"frozen model: {size} has {value:.1f} dB" for size, value in reached.frozen.items() if value < least]
    found += [f"engine: {size} has {value:.1f} dB" for size, value in reached.engine.items() if value < least]
    if (reached.integer or 0.0) < share:
        found.append(f"share in integers: {reached.integer}, not {share}")
    if reached.conversions > most * reached.products:
        found.append(f"{reached.conversions} layers convert for {reached.products} products, not {most} each")
    return found


def check(case: Case, backend: str, folder: Path) -> None:
    """Hold a case to its figures."""
    if case.error is not None:
        with pytest.raises(QuantizerError, match=case.error):
            reach(case, backend, folder)
        return
    assert faults_of(case, backend, reach(case, backend, folder)) == []


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
