"""The batches of the output check: at least 32 samples at every size that has a model of its own, and between."""

from __future__ import annotations

from collections import Counter

import torch

from quantizer.runs.outputs.check_batches import LEAST_SAMPLES
from quantizer.runs.outputs.check_batches import check_batches
from quantizer.runs.outputs.check_batches import check_shapes
from quantizer.runs.workload.module_feed import ModuleFeed


def test_the_least_the_usual_the_largest_and_two_between() -> None:
    shapes = check_shapes((1, 8, 64), (1, 128, 512), (8, 128))
    assert shapes[0] == (8, 128)
    assert {rows for rows, _ in shapes} == {1, 3, 8, 23, 64}
    assert {tokens for _, tokens in shapes} >= {1, 128, 512}
    assert check_shapes((4, 4, 4), (1, 1, 1), (4, 1)) == [(4, 1)]


def test_every_size_has_enough_real_samples() -> None:
    batches = [{"x": torch.arange(4.0)[:, None] + 4 * number} for number in range(16)]
    feed = ModuleFeed(batches)
    feed.rows_apart = True
    made = check_batches(feed, batches, [(4, 1), (1, 1), (3, 1)])
    counts: Counter[int] = Counter()
    for batch in made:
        counts[len(batch["x"])] += len(batch["x"])
    assert set(counts) == {4, 1, 3}
    assert all(count >= LEAST_SAMPLES for count in counts.values())
    # They are samples of the data, and not one of them again and again.
    assert len({float(value) for batch in made if len(batch["x"]) == 1 for value in batch["x"]}) == LEAST_SAMPLES


def test_a_model_that_mixes_samples_gets_whole_batches() -> None:
    batches = [{"x": torch.randn(4, 2)} for _ in range(16)]
    made = check_batches(ModuleFeed(batches), batches, [(4, 1), (1, 1)])
    assert [len(batch["x"]) for batch in made] == [4] * 8


def test_whole_batches_have_enough_samples_whatever_their_size() -> None:
    batches = [{"x": torch.randn(20, 2)} for _ in range(4)]
    assert [len(batch["x"]) for batch in check_batches(ModuleFeed(batches), batches, [(20, 1)])] == [20, 20]
