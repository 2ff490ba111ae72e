"""Metrics against scipy and by hand, and the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantizer.errors import TaskError
from quantizer.tasks import metrics
from quantizer.tasks.metrics import (
    accuracy,
    bootstrap_interval,
    kl_divergence,
    label_flips,
    mean_cosine,
    spearman,
    sqnr_db,
)


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def test_spearman_equals_scipy_with_ties(generator):
    from scipy.stats import spearmanr

    a, b = generator.integers(0, 20, (2, 5, 200)).astype(float)
    expected = [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(spearman(a, b), expected, atol=1e-12)
    assert float(spearman(a[0], a[0])) == pytest.approx(1)


def test_spearman_of_a_collapsed_model_is_zero():
    assert float(spearman(np.ones(10), np.arange(10))) == 0


def test_accuracy_and_flips():
    reference, other, labels = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), np.array([0, 1, 0, 1])
    assert float(accuracy(other, labels)) == 0.75
    assert label_flips(reference, other) == 0.25


def test_mean_cosine_counts_a_zero_vector_as_zero():
    reference, other = np.array([[3.0, 4.0], [1.0, 0.0]]), np.array([[6.0, 8.0], [0.0, 0.0]])
    assert mean_cosine(reference, other) == pytest.approx(0.5)


def test_kl_divergence_equals_torch(generator):
    import torch

    p, q = generator.normal(size=(2, 7, 3)).astype(np.float32) * 50
    expected = torch.nn.functional.kl_div(
        torch.from_numpy(q).double().log_softmax(-1),
        torch.from_numpy(p).double().log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    assert kl_divergence(p, q) == pytest.approx(expected.item())
    assert kl_divergence(p, p) == 0


def test_sqnr():
    reference = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert sqnr_db(reference, reference * 1.1) == pytest.approx(20)
    assert sqnr_db(reference, reference) == math.inf
    assert sqnr_db(np.zeros(2), np.ones(2)) == -math.inf


def test_figures_of_other_rows_are_refused():
    with pytest.raises(TaskError, match=r"shapes are \(3,\) and \(4,\): predict both sides on the same samples"):
        label_flips(np.zeros(3), np.zeros(4))


def test_bootstrap_is_paired_and_repeatable(generator):
    labels = generator.integers(0, 2, 400)
    reference = np.where(generator.random(400) < 0.9, labels, 1 - labels)
    assert bootstrap_interval(accuracy, reference, reference, labels) == (0, 0)
    other = reference.copy()
    other[:40] = 1 - labels[:40]
    low, high = bootstrap_interval(accuracy, reference, other, labels, n=500, seed=1)
    assert low < float(accuracy(other, labels) - accuracy(reference, labels)) < high < 0
    assert (low, high) == bootstrap_interval(accuracy, reference, other, labels, n=500, seed=1)
    assert (low, high) != bootstrap_interval(accuracy, reference, other, labels, n=500, seed=2)


def test_bootstrap_covers_the_normal_approximation(generator):
    # Half of the rows flip at random: the difference of two accuracies has a known spread.
    labels = np.zeros(2000, dtype=int)
    reference, other = generator.integers(0, 2, (2, 2000))
    low, high = bootstrap_interval(accuracy, reference, other, labels)
    spread = np.std((other == labels).astype(float) - (reference == labels)) / math.sqrt(2000)
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.1)


def test_bootstrap_does_not_depend_on_its_chunks(generator, monkeypatch):
    targets = generator.random(150)
    reference, other = targets + generator.normal(size=(2, 150)) * 0.3
    whole = bootstrap_interval(spearman, reference, other, targets, n=100)
    monkeypatch.setattr(metrics, "CHUNK_VALUES", 7 * 150)
    assert bootstrap_interval(spearman, reference, other, targets, n=100) == whole


def test_bootstrap_needs_rows_and_resamples():
    with pytest.raises(TaskError, match="a bootstrap of 0 resamples over 3 samples"):
        bootstrap_interval(accuracy, np.zeros(3), np.zeros(3), np.zeros(3), n=0)
    with pytest.raises(TaskError, match="a bootstrap of 10 resamples over 0 samples"):
        bootstrap_interval(accuracy, np.zeros(0), np.zeros(0), np.zeros(0), n=10)
