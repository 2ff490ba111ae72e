"""Latency of PyTorch, the float engine and the quantized one, in turns, at each shape."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quantizer.engines import Engine
from quantizer.engines import interleaved_latency
from quantizer.engines import medians
from quantizer.runs.stages import engine_inputs
from quantizer.tasks import Batch
from quantizer.tasks import batch_shape

__all__ = ["ShapeLatency", "measure_latency"]

_SECONDS = 12.0
_MOST_ROUNDS = 20


@dataclass(frozen=True)
class ShapeLatency:
    """Median milliseconds of each call at one shape.

    Attributes:
        batch: rows of the shape.
        sequence: tokens of it; None: rows are images.
        rounds: how many calls of each the median is of.
        milliseconds: by name.
    """

    batch: int
    sequence: int | None
    rounds: int
    milliseconds: dict[str, float]


def measure_latency(models: Mapping[str, nn.Module | Engine], batch: Batch, threads: int) -> ShapeLatency:
    """Time each of them on one batch, all with the same number of threads.

    Shapes that take long get fewer rounds after the first, which warms up: about 12 seconds of them, and one at least.

    Args:
        models: by name; modules run without gradients.
        batch: what they are called with.
        threads: of the CPU, for PyTorch; engines were loaded with theirs.
    """
    calls = {name: _call(model, batch) for name, model in models.items()}
    with _torch_threads(threads):
        once = sum(seconds[0] for seconds in interleaved_latency(calls, rounds=1, warmup=0).values())
        rounds = min(max(int(_SECONDS / once), 1), _MOST_ROUNDS)
        taken = interleaved_latency(calls, rounds=rounds, warmup=0)
    return ShapeLatency(*batch_shape(batch), rounds, {name: 1000 * value for name, value in medians(taken).items()})


def _call(model: nn.Module | Engine, batch: Batch) -> Callable[[], object]:
    if isinstance(model, nn.Module):
        return torch.no_grad()(partial(model, **batch))
    # An engine is called as a server calls it: with arrays.
    return partial(model, engine_inputs(model, batch))


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
