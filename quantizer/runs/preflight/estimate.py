"""An estimate of a run's time and memory, from its rows and the weights of its checkpoint; nothing is loaded.

The time is that of the forward passes alone: each row of text goes through the model a known number of times, a pass
multiplies each of its tokens by each weight outside the embeddings, and how fast this machine multiplies is measured.
Convolutions use a weight many times a row, so models of images get no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors import safe_open

from quantizer.config import RunConfig
from quantizer.errors import QuantizerError
from quantizer.tasks import Pair
from quantizer.tasks import Row
from quantizer.tasks import Sample
from quantizer.tasks import Text
from quantizer.tasks import resolve_source

__all__ = ["FORMS", "calibration_passes", "estimate", "row_passes", "run_estimate"]

_TOKENS_PER_WORD = 1.4
FORMS = 3
"""Forms of the model that are scored: float, quantized in PyTorch, and the engine."""
_BACKWARD = 3
"""A step of training costs about three passes."""
_AGAIN = {"fast": 0, "balanced": 14, "accurate": 16}
"""How often calibration rows go through the model again when ranges and codes are chosen, as counted on a BERT."""
_CHOSEN_ON = 128
"""At most so many of them."""
_COPIES = 5
"""Copies of the parameters in float32 at the peak: the model, its export in both forms, and the two engines."""
_LIBRARIES_GIB = 1.8
"""Libraries, batches and what is observed: what a run of MiniLM takes at its peak beside the copies."""
_SIDE = 512
_MINUTES = 90
"""Longer times are told in minutes."""


class _Weights(NamedTuple):
    parameters: int
    multiplied: int


def run_estimate(config: RunConfig, rows: Mapping[str, Sequence[Row]]) -> str | None:
    """Return the estimate of a run; see ``estimate``.

    Args:
        config: the configuration.
        rows: its rows, by section.
    """
    every = [row for part in rows.values() for row in part]
    return estimate(config.model.source, every, row_passes(config, rows), config.model.max_length)


def estimate(source: str, rows: Sequence[Row | Sample], passes: float, max_length: int) -> str | None:
    """Return about how long it takes and how much memory, and on what basis; None: the weights cannot be counted.

    Args:
        source: the source of the model.
        rows: the rows, or plain samples, of which the number of tokens is taken.
        passes: how many rows go through the model.
        max_length: the most tokens of a row.
    """
    weights = _weights(source)
    if weights is None:
        return None
    gib = _LIBRARIES_GIB + _COPIES * 4 * weights.parameters / 2**30
    count = f"{weights.parameters / 1e6:.1f} M parameters"
    memory = (
        f"about {gib:.1f} GiB of memory: {_COPIES} copies of {count} in float32, and "
        f"{_LIBRARIES_GIB:.1f} GiB of libraries and batches"
    )
    texts = [row for row in rows if isinstance(row, Text | Pair | str)]
    if not texts:
        return memory
    speed = _multiply_adds_per_second()
    tokens = min(statistics.mean(map(_tokens, texts)), max_length)
    seconds = passes * tokens * weights.multiplied / speed
    return (
        f"at least {_time(seconds)} of forward passes: {passes:,.0f} rows of about {tokens:.0f} tokens, times "
        f"{weights.multiplied / 1e6:.1f} M weights, at {speed / 1e9:.0f} billion multiply-adds a second, as measured "
        f"just now. On top come observation, export, engines and their timing, minutes for a small model. And {memory}"
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


def _weights(source: str) -> _Weights | None:
    """Return the number of a local checkpoint's parameters, and of those that are multiplied with."""
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
    multiplied = sum(size for name, size in sizes.items() if "embedding" not in name)
    return _Weights(sum(sizes.values()), multiplied) if sizes else None


def _multiply_adds_per_second() -> float:
    """Return how fast a product of two matrices of floats is computed here, at best of a few times."""
    one = torch.ones(_SIDE, _SIDE)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(one, one)
        best = min(best, time.perf_counter() - started)
    return _SIDE**3 / best


def _tokens(row: Text | Pair | str) -> float:
    text = row if isinstance(row, str) else row.text if isinstance(row, Text) else f"{row.first} {row.second}"
    return _TOKENS_PER_WORD * len(text.split()) + 2


def _time(seconds: float) -> str:
    return f"about {max(seconds, 1):.0f} s" if seconds < _MINUTES else f"about {seconds / 60:.0f} min"
