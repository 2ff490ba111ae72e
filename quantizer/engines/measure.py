"""Measurements of engines: latency in interleaved rounds, and in a fresh process the peak memory or a trial build.

``python -m quantizer.engines.measure memory|trial MODULE BACKEND ...`` is run in a process of its own by
``peak_memory_mib``, as a peak never falls, and by ``tried_build``, as a build may crash or hang.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantizer.engines.backends import backend as registered
from quantizer.engines.backends import build_engine, load_engine
from quantizer.engines.base import USUAL_SIZES, Array, BuildOptions, BuildResult, Engine, InputSizes
from quantizer.errors import EngineError, QuantizerError
from quantizer.export.qdq.onnx_file import TensorSpec
from quantizer.plan.targets import profile
from quantizer.utils.child_process import child_environment, python_command
from quantizer.utils.cpu import built_here, note_digests
from quantizer.utils.lazy import import_library


def in_own_process(task: str, backend: str, words: Sequence[object], *, doing: str, timeout_s: float) -> Any:
    """Do one of ``_TASKS`` in a fresh process, and return its result: what it crashes or holds is not this process's.

    ``doing`` names the task in messages. The process reads from its stdin which native code this one has built.
    """
    command = python_command("quantizer.engines.measure", task, type(registered(backend)).__module__, backend, *words)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            input=json.dumps(built_here()),
            env=child_environment(),
        )
    except OSError as error:
        raise EngineError(f"{doing} failed: its process cannot start ({error.strerror or error})") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{doing} took more than {timeout_s:g} s") from error
    if done.returncode < 0:
        raise EngineError(f"{doing} crashed: {signal.strsignal(-done.returncode)} (signal {-done.returncode})")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise EngineError(f"{doing} failed: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


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
    sizes: InputSizes = USUAL_SIZES,
    threads: int = 1,
    timeout_s: float = 600.0,
) -> PeakMemory:
    """Load an engine in a fresh process, run it a few times on made-up inputs, and return its peak resident memory.

    Args:
        path: the engine file, or an ONNX file for an engine on a CPU.
        backend: the backend's name.
        sizes: of the dynamic dimensions of the inputs.
        threads: threads of the CPU.
        timeout_s: seconds until the process is given up.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.

    Raises:
        EngineError: unknown backend; the engine does not load or run there, or takes longer than ``timeout_s``.
    """
    words = (path, threads, json.dumps(asdict(sizes)))
    doing = f"measuring the memory of {path}"
    return PeakMemory(**in_own_process("memory", backend, words, doing=doing, timeout_s=timeout_s))


_MOST = 2**40
"""So many values no input has: a file that was damaged may ask for them."""


def made_up_inputs(
    specs: Sequence[TensorSpec],
    sizes: InputSizes,
    whole: int = 1,
) -> dict[str, Array]:
    """Return an array for each input: ones for integers (a valid token id and mask), small random numbers for floats.

    Shapes: [None, 384] gives [batch, 384], [None, None] gives [batch, sequence]; axes of one name get one size.
    """
    random = np.random.default_rng(0)
    named = sizes.of([spec.dimensions for spec in specs])
    arrays: dict[str, Array] = {}
    for spec in specs:
        names = spec.dimensions or ("",) * len(spec.shape)
        shape = [
            size if size is not None else named.get(name, sizes.sequence if axis > 0 else sizes.batch)
            for axis, (size, name) in enumerate(zip(spec.shape, names, strict=True))
        ]
        if prod(shape) > _MOST:
            raise EngineError(f"input {spec} would have {prod(shape):.0e} values: a size in the file is wrong")
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else np.full(shape, whole)
        arrays[spec.name] = values.astype(spec.dtype)
    return arrays


def working_inputs(engine: Engine, sizes: InputSizes) -> dict[str, Array]:
    """Return made-up inputs that the engine runs with: ones, or zeros if ones fail, as in a table of one row."""
    inputs = made_up_inputs(engine.inputs, sizes)
    try:
        engine(inputs)
    except EngineError as error:
        inputs = made_up_inputs(engine.inputs, sizes, whole=0)
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


def _measured_memory(backend: str, path: str, threads: str, sizes: str) -> dict[str, Any]:
    library = profile(backend).library
    if library is not None:
        import_library(backend, library)
    baseline_mib = peak_rss_mib()
    # The memory for computing the checksum is not the engine's.
    engine = load_engine(backend, path, threads=int(threads), verify=False)
    inputs = working_inputs(engine, InputSizes(**json.loads(sizes)))
    for _ in range(_RUNS):
        engine(inputs)
    return asdict(PeakMemory(peak_mib=peak_rss_mib(), baseline_mib=baseline_mib))


_OF_A_TRIAL = InputSizes(1, 16)
TIMEOUT_S = 600.0
"""After so many seconds a build and its first run are given up."""


def tried_build(
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    *,
    threads: int = 1,
    sizes: InputSizes = _OF_A_TRIAL,
    timeout_s: float | None = None,
) -> BuildResult:
    """Build an engine and run it once on made-up inputs, in a fresh process.

    Args:
        backend: the backend's name.
        onnx: the ONNX file to read.
        engine: the engine file to write.
        options: those of a backend on a CPU.
        threads: threads of the CPU.
        sizes: of the dynamic dimensions of the inputs.
        timeout_s: seconds until it is given up; None: ``TIMEOUT_S``.
    """
    told = {
        "dynamic": dict(options.dynamic),
        "only_sizes": list(map(dict, options.only_sizes)),
        "inference_precision": options.inference_precision,
        "compiled": options.compiled,
    }
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    words = (onnx, engine, threads, json.dumps(told), json.dumps(asdict(sizes)))
    doing = f"building and running {engine.name} for {backend} in a process of its own"
    result = in_own_process("trial", backend, words, doing=doing, timeout_s=timeout_s)
    note_digests(result["native"])
    return BuildResult(engine, result["size_bytes"], result["seconds"], tuple(result["warnings"]))


def _tried_here(backend: str, onnx: str, engine: str, threads: str, options: str, sizes: str) -> dict[str, Any]:
    built = build_engine(backend, onnx, engine, BuildOptions(**json.loads(options)))
    loaded = load_engine(backend, engine, threads=int(threads), verify=False)
    loaded(working_inputs(loaded, InputSizes(**json.loads(sizes))))
    return {**asdict(built), "path": str(built.path), "native": built_here()}


_TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {"memory": _measured_memory, "trial": _tried_here}


def main(arguments: Sequence[str]) -> int:
    """Do a task in this process, and print one line of JSON; return 1 after a message if the engine fails."""
    task, module, *words = arguments
    try:
        # Importing the module of the backend's class registers a backend from outside the package.
        import_module(module)
        found = _TASKS[task](*words)
    except (QuantizerError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    note_digests(json.load(sys.stdin))
    sys.exit(main(sys.argv[1:]))
