"""Latency of several engines, timed in turns, and the peak memory of one in a process of its own."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quantizer.engines.measure.own_process import in_own_process
from quantizer.errors import EngineError

_FEWEST_ROUNDS = 3
_WARM = 0.1
"""The share of the time after which one round before is enough: calls are so slow that a second one is no faster."""


def interleaved_latency(
    callables: Mapping[str, Callable[[], object]], rounds: int = 20, warmup: int = 3, seconds: float | None = None
) -> dict[str, list[float]]:
    """Return the seconds of each call of each callable; sample i of all is from round i, so that ratios can be paired.

    Callables take turns, and each round starts with the next one. So a slow phase of the machine slows all of them, and
    none always follows the same neighbour.

    Args:
        callables: what to time, by name.
        rounds: samples of each.
        warmup: rounds before, not counted.
        seconds: about how long all of it may take; slow calls are called in 3 rounds at least, and one before. None:
            as long as it takes.

    Raises:
        EngineError: nothing to time, or no rounds.
    """
    if not callables:
        raise EngineError("no engine to time: give at least one")
    if rounds < 1 or warmup < 0:
        raise EngineError(f"rounds is {rounds} and warmup {warmup}: expected 1 or more, and 0 or more")
    names = list(callables)
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for turn in range(-warmup, rounds):
        spent = 0.0 if seconds is None else (time.perf_counter() - begin) / seconds
        if turn >= _FEWEST_ROUNDS and spent > 1:
            break
        if -warmup < turn < 0 and spent > _WARM:
            continue
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            callables[name]()
            elapsed = time.perf_counter() - started
            if turn >= 0:
                samples[name].append(elapsed)
    return samples


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each list of samples, in the samples' unit."""
    return {name: statistics.median(values) for name, values in samples.items()}


@dataclass(frozen=True)
class PeakMemory:
    """Peak resident memory of a process, in MiB.

    Attributes:
        peak_mib: after loading an engine and running it.
        baseline_mib: of the same process before, with the interpreter and the library imported.
    """

    peak_mib: float
    baseline_mib: float


def peak_memory_mib(
    path: str | Path,
    backend: str,
    batch: int = 8,
    sequence: int = 128,
    threads: int = 1,
    timeout_s: float = 600.0,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> PeakMemory:
    """Load an engine in a fresh process, run it a few times on made-up inputs, and return its peak resident memory.

    Args:
        path: the engine file, or an ONNX file for an engine on a CPU.
        backend: the backend's name.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        threads: threads of the CPU.
        timeout_s: seconds until the process is given up.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: unknown backend; the engine does not load or run there, or takes longer than ``timeout_s``.
    """
    words = (path, batch, sequence, threads, json.dumps(dict(sizes)))
    doing = f"measuring the memory of {path}"
    return PeakMemory(
        **in_own_process("quantizer.engines.measure.memory", backend, words, doing=doing, timeout_s=timeout_s)
    )
