"""An estimate of a run's time and memory, from an earlier run and the weights of its checkpoint; nothing is loaded.

The time is what the same work took before. Where nothing did it, none is told: most of a run is neither counted nor
known before it, such as the builds of engines and their timing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quantizer.config import RunConfig
from quantizer.errors import QuantizerError
from quantizer.report import Stage
from quantizer.runs.progress.stage_timer import rounded_time
from quantizer.tasks import Pair, Row, Sample, Text, resolve_source

_TOKENS_PER_WORD = 1.4
FORMS = 3
"""Forms of the model that are scored: float, quantized in PyTorch, and the engine."""
_BACKWARD = 3
"""A step of training costs about three passes."""
_AGAIN = {"plain": 0, "fast": 4, "balanced": 12, "accurate": 15}
"""How often calibration rows go through the model again when ranges and codes are chosen, as counted on a BERT."""
_CHOSEN_ON = 128
"""At most so many of them."""
_COPIES = 5
"""Copies of the parameters in float32 at the peak: the model, its export in both forms, and the two engines."""
_LIBRARIES_GIB = 1.8
"""Libraries, batches and what is observed: what a run of MiniLM takes at its peak beside the copies."""


def run_estimate(config: RunConfig, rows: Mapping[str, Sequence[Row]], earlier: Sequence[Stage] = ()) -> str | None:
    """Return the estimate of a run; see ``estimate``."""
    every = [row for part in rows.values() for row in part]
    return estimate(config.model.source, every, row_passes(config, rows), config.model.max_length, earlier)


def estimate(
    source: str, rows: Sequence[Row | Sample], passes: float, max_length: int, earlier: Sequence[Stage] = ()
) -> str | None:
    """Return about how long it takes and how much memory, and on what basis; None: the weights cannot be counted."""
    parameters = _parameters(source)
    if parameters is None:
        return None
    gib = _LIBRARIES_GIB + _COPIES * 4 * parameters / 2**30
    memory = (
        f"memory: about {gib:.1f} GiB, for {_COPIES} copies of {parameters / 1e6:.1f} M parameters in float32, and "
        f"{_LIBRARIES_GIB:.1f} GiB of libraries and batches"
    )
    if words := rounded_time(sum(stage.seconds for stage in earlier)):
        return f"time: about {words}, as the same took before; {memory}"
    texts = [row for row in rows if isinstance(row, Text | Pair | str)]
    length = f" of about {min(statistics.mean(map(_tokens, texts)), max_length):.0f} tokens" if texts else ""
    return (
        f"time: not known before a first run; {passes:,.0f} rows{length} go through the model at least, and export, "
        f"engines, their scores and their timing come on top; {memory}"
    )


def calibration_passes(preset: str, rows: int) -> int:
    """Return how many rows go through the model in a calibration on ``rows`` rows."""
    return rows + _AGAIN[preset] * min(rows, _CHOSEN_ON)


def row_passes(config: RunConfig, rows: Mapping[str, Sequence[Row]]) -> float:
    """Return how many rows go through the model in a run, at least, each pass of a row counted."""
    count = {name: len(part) for name, part in rows.items()}
    passes: float = calibration_passes(config.quantizer.preset, count.get("calibration", 0))
    passes += FORMS * count.get("evaluation", 0) + count.get("head", 0)
    if config.fallback is not None and config.fallback.max_drop is not None:
        passes += count.get("tuning", 0) * config.fallback.evaluations
    if config.qat is not None:
        passes += _BACKWARD * config.qat.epochs * count.get("training", 0)
        passes += count.get("tuning", 0) * config.qat.evaluations
    return passes


def _parameters(source: str) -> int | None:
    """Return the number of a local checkpoint's parameters; None: they cannot be counted."""
    try:
        folder = resolve_source(source)
    except QuantizerError:
        return None
    files = sorted(folder.glob("*.safetensors")) if isinstance(folder, Path) else []
    sizes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    shape = tensors.get_slice(name).get_shape()
                    sizes[name] = torch.Size(shape).numel()
        except (SafetensorError, OSError):
            # That it is damaged is told when it is loaded.
            return None
    return sum(sizes.values()) or None


def _tokens(row: Text | Pair | str) -> float:
    text = row if isinstance(row, str) else row.text if isinstance(row, Text) else f"{row.first} {row.second}"
    return _TOKENS_PER_WORD * len(text.split()) + 2
