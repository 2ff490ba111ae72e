"""Scores, figures that compare a model with the float model, and bootstrap intervals of score differences.

Shapes: N samples, R resamples, D width of an embedding, C classes. All is computed with NumPy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.utils.records import paired_interval

Array: TypeAlias = npt.NDArray[Any]
Metric: TypeAlias = Callable[[Array, Array], Array]
"""A function of decisions and targets, both [N] or [R x N], that returns one score per leading index: [] or [R]."""

# Resamples are scored in chunks: the ranks of 100,000 samples in 1,000 resamples would take gigabytes at once.
CHUNK_VALUES = 2_000_000


def spearman(decisions: Array, targets: Array) -> Array:
    """Return Spearman's rank correlation over the last axis, ties by mean rank; 0 if either side is constant."""
    stats = _scipy_stats()
    ranks_a = np.asarray(stats.rankdata(decisions, axis=-1), dtype=np.float64)
    ranks_b = np.asarray(stats.rankdata(targets, axis=-1), dtype=np.float64)
    ranks_a -= ranks_a.mean(axis=-1, keepdims=True)
    ranks_b -= ranks_b.mean(axis=-1, keepdims=True)
    covariance = (ranks_a * ranks_b).sum(axis=-1)
    spread = np.sqrt((ranks_a**2).sum(axis=-1) * (ranks_b**2).sum(axis=-1))
    return np.asarray(np.divide(covariance, spread, out=np.zeros_like(spread), where=spread > 0))


def accuracy(decisions: Array, targets: Array) -> Array:
    """Return the share of equal labels over the last axis."""
    return np.asarray((decisions == targets).mean(axis=-1))


def label_flips(reference: Array, other: Array) -> float:
    """Return the share of labels [N] that differ."""
    _same_shape(reference, other)
    return float((reference != other).mean())


def mean_cosine(reference: Array, other: Array) -> float:
    """Return the mean cosine between the rows of two arrays [N x D]; the cosine with a zero vector counts as 0."""
    _same_shape(reference, other)
    a, b = reference.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.divide((a * b).sum(axis=-1), lengths, out=np.zeros_like(lengths), where=lengths > 0).mean())


def kl_divergence(reference: Array, other: Array) -> float:
    """Return the mean over samples of KL(reference || other) in nats, of the softmax of logits [N x C]."""
    _same_shape(reference, other)
    p, q = _log_softmax(reference), _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def sqnr_db(reference: Array, other: Array) -> float:
    """Return the signal-to-quantization-noise ratio in dB: 10 log10(power of reference / power of difference)."""
    _same_shape(reference, other)
    signal = float((reference.astype(np.float64) ** 2).sum())
    noise = float(((reference.astype(np.float64) - other.astype(np.float64)) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def bootstrap_interval(
    metric: Metric, reference: Array, other: Array, targets: Array, n: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of ``metric(other) - metric(reference)``.

    Each resample draws the same samples for both models, so that variation that they share does not widen the interval.

    Args:
        metric: see ``Metric``.
        reference: decisions [N] of the float model.
        other: decisions [N] of the other model on the same samples.
        targets: the targets [N] of both.
        n: the number of resamples, at least 1.
        seed: the same seed draws the same samples.
    """
    _same_shape(reference, other)
    first, second = (resampled_scores(metric, decisions, targets, n, seed) for decisions in (reference, other))
    return paired_interval(first, second)


def resampled_scores(metric: Metric, decisions: Array, targets: Array, n: int = 1000, seed: int = 0) -> Array:
    """Return the score of each bootstrap resample [n]; one seed draws the same samples for every model.

    Arguments and errors are those of ``bootstrap_interval``.
    """
    _same_shape(decisions, targets)
    if n < 1 or decisions.size == 0:
        raise TaskError(f"a bootstrap of {n} resamples over {decisions.size} samples: expected at least 1 of each")
    generator = np.random.default_rng(seed)
    samples = decisions.shape[0]
    chunk = max(1, CHUNK_VALUES // decisions.size)
    scores = []
    for start in range(0, n, chunk):
        picked = generator.integers(samples, size=(min(chunk, n - start), samples))
        scores.append(metric(decisions[picked], targets[picked]))
    return np.concatenate(scores)


def _same_shape(first: Array, second: Array) -> None:
    if first.shape != second.shape:
        raise TaskError(
            f"paired figures need outputs of the same samples, but the shapes are {first.shape} and {second.shape}: "
            f"predict both sides on the same samples"
        )


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise MissingDependencyError("scipy", "hf") from error
    return stats
