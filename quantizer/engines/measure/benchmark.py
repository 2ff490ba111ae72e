"""Latency of several engines, timed in turns, and the peak memory of one in a process of its own.

Inputs made up from an engine's own description, to run it without data.

Peak memory of an engine, as JSON.

``python -m quantizer.engines.measure.benchmark MODULE BACKEND PATH BATCH SEQUENCE THREADS SIZES`` is run by
``peak_memory_mib`` in a process of its own: a peak never falls, so one process measures one engine.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from quantizer.engines.backends import load_engine
from quantizer.engines.base import Array, Engine, TensorSpec
from quantizer.engines.dimensions import dimension_sizes
from quantizer.engines.measure.own_process import in_own_process, read_built
from quantizer.engines.optional_import import import_library
from quantizer.errors import EngineError, QuantizerError
from quantizer.targets import profile

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
        **in_own_process("quantizer.engines.measure.benchmark", backend, words, doing=doing, timeout_s=timeout_s)
    )


_MOST = 2**40
"""So many values no input has: a file that was damaged may ask for them."""


def made_up_inputs(
    specs: Sequence[TensorSpec],
    batch: int,
    sequence: int,
    whole: int = 1,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Array]:
    """Return an array for each input: ones for integers (a valid token id and mask), small random numbers for floats.

    Shapes: [None, 384] gives [batch, 384], [None, None] gives [batch, sequence]; axes of one name get one size.
    """
    random = np.random.default_rng(0)
    named = dimension_sizes([spec.dimensions for spec in specs], batch, sequence, sizes)
    arrays: dict[str, Array] = {}
    for spec in specs:
        names = spec.dimensions or ("",) * len(spec.shape)
        shape = [
            size if size is not None else named.get(name, sequence if axis > 0 else batch)
            for axis, (size, name) in enumerate(zip(spec.shape, names, strict=True))
        ]
        if prod(shape) > _MOST:
            raise EngineError(f"input {spec} would have {prod(shape):.0e} values: a size in the file is wrong")
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else np.full(shape, whole)
        arrays[spec.name] = values.astype(spec.dtype)
    return arrays


def working_inputs(
    engine: Engine, batch: int, sequence: int, sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Array]:
    """Return made-up inputs that the engine runs with: ones, or zeros if ones fail, as in a table of one row."""
    inputs = made_up_inputs(engine.inputs, batch, sequence, sizes=sizes)
    try:
        engine(inputs)
    except EngineError as error:
        inputs = made_up_inputs(engine.inputs, batch, sequence, whole=0, sizes=sizes)
        try:
            engine(inputs)
        except EngineError:
            raise error from None
    return inputs


_RUNS = 3


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        # Not ru_maxrss: on Linux a new program starts with the peak of the process that started it.
        return int(match[1]) / 1024
    # Bytes on macOS, KiB elsewhere.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON; return 1 after a message if the engine does not load or run."""
    module, backend, path, batch, sequence, threads, sizes = arguments
    try:
        # Importing the module of the backend's class registers a backend from outside the package.
        import_module(module)
        library = profile(backend).library
        if library is not None:
            import_library(backend, library)
        baseline_mib = peak_rss_mib()
        # The memory for computing the checksum is not the engine's.
        engine = load_engine(backend, path, threads=int(threads), verify=False)
        inputs = working_inputs(engine, int(batch), int(sequence), json.loads(sizes))
        for _ in range(_RUNS):
            engine(inputs)
    except (QuantizerError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps(asdict(PeakMemory(peak_mib=peak_rss_mib(), baseline_mib=baseline_mib))))
    return 0


if __name__ == "__main__":
    read_built()
    sys.exit(main(sys.argv[1:]))
