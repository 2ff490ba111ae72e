"""The batches on which an engine's outputs are compared with PyTorch's: real samples, at several sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from quantizer.config import RunConfig
from quantizer.pipeline.module_feed import ModuleFeed
from quantizer.tasks import Batch, Feed, rows_at
from quantizer.tasks.inputs import TextInputs
from quantizer.utils.sizes import BATCH

LEAST_SAMPLES = 32
"""How many samples are compared at each size: on a few, chance decides whether an engine looks right."""

Sizes = Sequence[int]


def check_shapes(batch: Sizes, sequence: Sizes, usual: tuple[int, int]) -> list[tuple[int, int]]:
    """Return batch sizes with lengths: the usual ones first, the least and the largest of both, and two between.

    OpenVINO's file has models of its own for some sizes, and one for all others: each of them is compared.
    """
    rows, tokens = (
        [sizes[0], round(math.sqrt(sizes[0] * sizes[1])), round(math.sqrt(sizes[1] * sizes[2])), sizes[2]]
        for sizes in (batch, sequence)
    )
    # A large batch of long texts would take minutes, and has the model of the others.
    shapes = [usual, (batch[1], sequence[1]), (rows[0], tokens[3]), (rows[3], tokens[0])]
    return list(dict.fromkeys([*shapes, (rows[1] + (rows[1] == rows[0] < batch[1]), tokens[2]), (rows[2], tokens[1])]))


def checked_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return the sizes at which the engines of a run are compared; see ``check_shapes``."""
    dynamic, report = config.export.dynamic, config.report
    shapes = check_shapes(dynamic.batch, dynamic.sequence, (report.latency_batch, report.latency_sequence))
    timed = zip(dynamic.batch, dynamic.sequence, strict=True) if report.latency_shapes == "all" else ()
    return list(dict.fromkeys([*shapes, *timed]))


def check_batches(feed: Feed, samples: Sequence[Any], shapes: Sequence[tuple[int, int]]) -> list[Batch]:
    """Return batches of ``shapes``, as many of each as have ``LEAST_SAMPLES`` samples between them.

    Args:
        feed: makes the batches.
        samples: what they are made of, without labels; the batches of a module that was given in Python.
        shapes: batch sizes with lengths. A module keeps the lengths of its own batches. No length is beyond the
            positions of the model.
    """
    if isinstance(feed, ModuleFeed):
        return list(
            _of_module(feed, list(samples) or [feed.example()], list(dict.fromkeys(size for size, _ in shapes)))
        )
    if isinstance(feed.inputs, TextInputs) and (longest := feed.inputs.max_positions) is not None:
        shapes = [(size, min(sequence, longest)) for size, sequence in shapes]
    made = []
    has_lengths = _has_lengths(feed, samples, [sequence for _, sequence in shapes])
    for size, sequence in dict.fromkeys((size, sequence if has_lengths else shapes[0][1]) for size, sequence in shapes):
        for start in range(0, LEAST_SAMPLES if samples else 1, size):
            turn = start % len(samples) if samples else 0
            made.append(feed.compared([*samples[turn:], *samples[:turn]], size, sequence))
    return made


def _has_lengths(feed: Feed, samples: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return whether the lengths of batches can be chosen: images have none."""
    one, other = (feed.inputs.filled(samples, 1, length) for length in (min(lengths), max(lengths)))
    return any(one[name].shape != other[name].shape for name in one)


def _of_module(feed: ModuleFeed, batches: Sequence[Batch], sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield the rows of a module's batches: those of the shape that comes most often in ``sizes``, the usual one first.

    Those of the least and of the largest shape come in the usual size. A model that mixes rows gets its batches whole.
    """
    alike: dict[tuple[Any, ...], list[Batch]] = {}
    for batch in batches:
        alike.setdefault(tuple((name, tuple(value.shape[1:])) for name, value in batch.items()), []).append(batch)
    by_size = sorted(alike.values(), key=lambda group: sum(value[0].numel() for value in group[0].values()))
    most = max(by_size, key=len)
    for group in {id(group): group for group in (most, by_size[0], by_size[-1])}.values():
        count = _rows(group[0])
        if not (feed.rows_apart and feed.sizes.is_open(BATCH)):
            yield from group[: math.ceil(LEAST_SAMPLES / count)]
            continue
        pool = _joined(group[:LEAST_SAMPLES])
        for size in sizes if group is most else sizes[:1]:
            for start in range(0, LEAST_SAMPLES, size):
                yield rows_at(pool, [(start + row) % _rows(pool) for row in range(size)])


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches; an input that has not as many rows is that of the first."""
    return {
        name: torch.cat([one[name] for one in batches]) if len(value) == _rows(batches[0]) else value
        for name, value in batches[0].items()
    }
