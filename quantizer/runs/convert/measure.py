"""The latency of PyTorch, the float engine and the quantized engine, measured in turns at each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quantizer.engines import Engine, interleaved_latency, medians
from quantizer.runs.run_context import engine_inputs
from quantizer.tasks import Batch, batch_shape

_SECONDS = 12.0
_MOST_ROUNDS = 20


@dataclass(frozen=True)
class ShapeLatency:
    """The median latency of each model and engine at one shape.

    Attributes:
        batch: the rows of the shape.
        sequence: its tokens; None: rows are images.
        rounds: the number of calls of each that were timed.
        milliseconds: the median latency, by name.
        times_ms: the latency in each round, by name.
    """

    batch: int
    sequence: int | None
    rounds: int
    milliseconds: dict[str, float]
    times_ms: dict[str, tuple[float, ...]]

    def named(self, names: Mapping[str, str]) -> ShapeLatency:
        """Return the latencies of some alone, under other names."""
        return replace(
            self,
            milliseconds={told: self.milliseconds[name] for name, told in names.items()},
            times_ms={told: self.times_ms[name] for name, told in names.items()},
        )

    def __str__(self) -> str:
        return f"batch {self.batch}" if self.sequence is None else f"{self.batch} x {self.sequence}"


def measure_latency(models: Mapping[str, nn.Module | Engine], batch: Batch, threads: int) -> ShapeLatency:
    """Measure the latency of models and engines on one batch, all with the same number of threads.

    After a first round, which warms up, there are as many rounds as take about 12 seconds, 1 to 20.
    """
    calls = {name: _call(model, batch) for name, model in models.items()}
    with _torch_threads(threads):
        once = sum(seconds[0] for seconds in interleaved_latency(calls, rounds=1, warmup=0).values())
        rounds = min(max(int(_SECONDS / once), 1), _MOST_ROUNDS)
        taken = interleaved_latency(calls, rounds=rounds, warmup=0)
    times_ms = {name: tuple(1000 * value for value in seconds) for name, seconds in taken.items()}
    return ShapeLatency(*batch_shape(batch), rounds, medians(times_ms), times_ms)


def _call(model: nn.Module | Engine, batch: Batch) -> Callable[[], object]:
    if isinstance(model, nn.Module):
        return torch.no_grad()(partial(model, **batch))
    # Servers call an engine with arrays: their conversion does not count.
    return partial(model, engine_inputs(model, batch))


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
