"""Large calibration batches come in parts of 16 samples or 8 images, unless the model mixes or fixes samples."""

from __future__ import annotations

import torch

from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.pipeline.workload import in_parts
from quantizer.utils.sizes import BATCH, SEQUENCE


def _feed(batches: list[dict[str, torch.Tensor]], *, independent: bool = True) -> ModuleFeed:
    feed = ModuleFeed(batches)
    feed.samples_independent = independent
    return feed


def _batches(*rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(count, 3, generator=generator), "table": torch.ones(7, 2)} for count in rows]


def test_large_batches_become_equal_parts_with_the_same_samples() -> None:
    batches = _batches(40, 32, 16, 3)
    parts = in_parts(batches, _feed(batches))
    assert [len(part["x"]) for part in parts] == [14, 14, 12, 16, 16, 16, 3]
    assert torch.equal(torch.cat([part["x"] for part in parts]), torch.cat([batch["x"] for batch in batches]))
    assert all(torch.equal(part["table"], batches[0]["table"]) for part in parts)


def test_large_samples_come_in_smaller_parts() -> None:
    batches = [{"x": torch.randn(16, 3, 128, 128)}]
    assert [len(part["x"]) for part in in_parts(batches, _feed(batches))] == [8, 8]


def test_a_model_that_mixes_samples_gets_its_batches() -> None:
    batches = _batches(40, 32)
    assert in_parts(batches, _feed(batches, independent=False)) is batches


def test_a_model_that_fixes_its_batch_gets_its_batches() -> None:
    batches = _batches(40, 40)
    feed = _feed(batches)
    feed.keep_open({"x": {1: SEQUENCE}})
    assert not feed.sizes.is_open(BATCH)
    assert in_parts(batches, feed) is batches
