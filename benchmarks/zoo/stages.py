"""What every model of the zoo goes through, as facts of a row that are told one by one.

So the row of a model that hangs or dies has all that was found before, and the stage in which it ended.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from guess import said
from torch import Tensor, nn
from zoo_models import Made, Subject, modality_of, subjects
from zoo_steps import run, run_eager, unequal, unequal_observed

from quantizer import Quantizer
from quantizer.plan.coverage import Coverage
from quantizer.tasks.metrics import sqnr_db

__all__ = ["STAGES", "Ended", "Tell", "calibrated", "passed", "stage", "through"]

Tell = Callable[[str, Any], None]
"""Receives a fact's name and its value, plain data."""

OK = "ok"
STAGES = ("built", "off", "calibrated", "quantized", "saved")
"""Each is "ok" or a reason, and nothing where one before it failed."""


class Ended(Exception):
    """A stage failed, and has told why."""


def through(key: str, tell: Tell) -> None:
    """Tell everything about the subject of a key, until a stage fails."""
    with suppress(Ended):
        passed(next(subject for subject in subjects() if subject.key == key), tell)


def passed(subject: Subject, tell: Tell) -> tuple[Quantizer, Made]:
    """Tell everything about a subject; return its calibrated quantizer and its model.

    Raises:
        Ended: a stage failed.
    """
    made = stage("built", tell, subject.made)
    _describe(subject, made, tell)
    expected = stage("built", tell, lambda: run(made.model, made.batch(0)))
    stage("off", tell, lambda: _off(made, expected))
    eager = stage("calibrated", tell, lambda: run_eager(made.model, made.batch(0)))
    tell("eager_db", _agreement(expected, eager))
    quantizer = stage("calibrated", tell, lambda: calibrated(made, eager))
    _cover(quantizer.coverage, tell)
    frozen, given = stage("quantized", tell, lambda: _quantized(quantizer, made, expected))
    tell("sqnr_db", _agreement(expected, given))
    del frozen
    stage("saved", tell, lambda: _loaded(quantizer, made, given))
    return quantizer, made


def calibrated(made: Made, eager: dict[str, Tensor]) -> Quantizer:
    """A quantizer that has seen two batches; ``eager`` is what an observing proxy must give for the first."""
    quantizer = Quantizer(preset="plain", backend="openvino")
    calib = quantizer.calib(made.model)
    different = unequal_observed(run(calib, made.batch(0)), eager, made.model)
    if different:
        raise AssertionError(f"an observing proxy differs in {', '.join(different[:3])}")
    run(calib, made.batch(1))
    _ = quantizer.coverage
    return quantizer


def stage(name: str, tell: Tell, work: Callable[[], Any]) -> Any:
    """Return what ``work`` gives, and tell that this stage is ok, or why it failed.

    Raises:
        Ended: it failed.
    """
    tell("stage", name)
    try:
        found = work()
    except Exception as error:
        tell(name, said(error))
        raise Ended from error
    tell(name, OK)
    return found


def _describe(subject: Subject, made: Made, tell: Tell) -> None:
    batch = made.batch(0)
    tell("model", type(made.model).__name__)
    tell("parameters", sum(value.numel() for value in made.model.parameters()))
    tell("inputs", {name: list(value.shape) for name, value in batch.items()})
    tell("modality", modality_of(subject.name, list(batch)))


def _off(made: Made, expected: dict[str, Tensor]) -> None:
    repeated = unequal(run(made.model, made.batch(0)), expected)
    if repeated:
        raise AssertionError(f"the float model itself gives other values each time: {', '.join(repeated[:3])}")
    different = unequal(run(Quantizer(preset="plain").proxy(made.model), made.batch(0)), expected)
    if different:
        raise AssertionError(f"a proxy that is off differs in {', '.join(different[:3])}")


def _cover(coverage: Coverage, tell: Tell) -> None:
    tell("sites", sum(row.quantized for row in coverage))
    tell("multiply_adds", coverage.multiply_adds)
    tell("share", coverage.share)
    reasons: Counter[str] = Counter()
    for row in coverage.not_quantized:
        reasons[f"{row.operation}: {row.reason}"] += row.multiply_adds
    tell("not_quantized", {reason: count / coverage.multiply_adds for reason, count in reasons.most_common() if count})


def _quantized(quantizer: Quantizer, made: Made, expected: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    frozen = quantizer.quantize(made.model)
    given = run(frozen, made.batch(0))
    wrong = [name for name, value in given.items() if not value.isfinite().all() and expected[name].isfinite().all()]
    if wrong:
        raise AssertionError(f"values that are not finite in {', '.join(wrong[:3])}")
    if not unequal(given, expected):
        raise AssertionError("the outputs are those of the float model: nothing is rounded")
    return frozen, given


def _loaded(quantizer: Quantizer, made: Made, given: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        quantizer.save(Path(folder) / "quantizer")
        again = Quantizer.load(Path(folder) / "quantizer").quantize(made.model)
        different = unequal(run(again, made.batch(0)), given)
    if different:
        raise AssertionError(f"after saving and loading, other values in {', '.join(different[:3])}")


def _agreement(expected: dict[str, Tensor], given: dict[str, Tensor]) -> float | None:
    """SQNR of the first floating output, in dB; None if it has other shapes, as where a model chooses how many."""
    for name, value in expected.items():
        if value.is_floating_point() and value.numel() > 1:
            other = given.get(name)
            if other is None or other.shape != value.shape:
                return None
            return min(sqnr_db(value.double().numpy(), other.double().numpy()), 999.0)
    return None
