"""Measurements of engines: interleaved latency, peak memory, and trial builds in a separate process.

``python -m quantizer.engines.measure`` serves a ``Worker``: memory is measured in a fresh process, because its peak
never falls, and trial builds have a process of their own, because they may crash or hang.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
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
from quantizer.utils.cpu import built_here, note_digests
from quantizer.utils.lazy import import_library
from quantizer.utils.worker import Worker, serve

_KEPT: ContextVar[Worker | None] = ContextVar("_KEPT", default=None)
"""The process for trial builds, inside ``trial_process``."""


@contextmanager
def trial_process(backends: Iterable[str] = ()) -> Iterator[None]:
    """Keep one process for all trial builds in the block, and end it with the block.

    It starts at once, and imports the libraries of ``backends`` while this process does other work.
    """
    with Worker(__name__) as worker:
        for name in backends:
            # If it cannot start, the first trial says so.
            with suppress(OSError):
                worker.tell(_request("prepare", name, ()))
        token = _KEPT.set(worker)
        try:
            yield
        finally:
            _KEPT.reset(token)


def end_trial_process() -> None:
    """End the process of ``trial_process`` before its block ends, if there is one; a later trial starts another."""
    if (worker := _KEPT.get()) is not None:
        worker.close()


def finish_trials() -> None:
    """Wait for the trial builds that ``begin_build`` began, so that they do not disturb a measurement."""
    if (worker := _KEPT.get()) is not None:
        worker.finish(TIMEOUT_S)


def in_own_process(task: str, backend: str, words: Sequence[Any], *, doing: str, timeout_s: float) -> Any:
    """Run a task of ``_TASKS`` in another process, and return its result.

    Trial builds share the process of ``trial_process``, if there is one; every other task has a fresh process.

    Args:
        task: the task.
        backend: name of the backend.
        words: its other arguments, values for JSON.
        doing: the name of the task in messages.
        timeout_s: time limit in seconds.

    Raises:
        EngineError: the task failed, took too long, or crashed its process.
    """
    request, name, kept = _request(task, backend, words), _name(task, backend, words), _KEPT.get()
    if kept is not None and task == "trial":
        return kept.ask(name, request, doing=doing, timeout_s=timeout_s)
    with Worker(__name__) as worker:
        return worker.ask(name, request, doing=doing, timeout_s=timeout_s)


def begin_in_own_process(task: str, backend: str, words: Sequence[Any]) -> None:
    """Begin a task for a later ``in_own_process``; do nothing outside ``trial_process``."""
    if (worker := _KEPT.get()) is not None:
        worker.begin(_name(task, backend, words), _request(task, backend, words))


def _name(task: str, backend: str, words: Sequence[Any]) -> str:
    """Return the name of a request: what it asks for."""
    return json.dumps([task, backend, words], sort_keys=True)


def _request(task: str, backend: str, words: Sequence[Any]) -> dict[str, Any]:
    """Return a request for ``carried_out``, with the native code that this process has built and trusts."""
    module = type(registered(backend)).__module__
    return {"task": task, "module": module, "backend": backend, "words": [*words], "native": built_here()}


def carried_out(request: Mapping[str, Any]) -> Any:
    """Carry out a request of ``in_own_process`` in this process."""
    note_digests(request["native"])
    # Importing its module registers a backend of another package.
    import_module(request["module"])
    return _TASKS[request["task"]](request["backend"], *request["words"])


_MIN_ROUNDS = 3
_ENOUGH_WARMUP = 0.1
"""Share of the time limit after which one warmup round is enough: a second call of slow functions is not faster."""


_FAR_BEYOND = 2.0
"""Multiple of the time limit after which one counted round is enough."""


def interleaved_latency(
    callables: Mapping[str, Callable[[], object]],
    rounds: int = 20,
    warmup: int = 3,
    seconds: float | None = None,
    *,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each call by callable; sample i of all callables is from round i.

    Each round starts with the next callable. A slow phase of the machine affects all callables, and none always follows
    the same neighbor.

    Args:
        callables: functions to time, by name.
        rounds: samples of each.
        warmup: rounds before, not counted.
        seconds: approximate time limit for all rounds; slow callables get at least 3 rounds after one warmup, or one
            round if two rounds take twice the limit. None: no limit.
        clock: returns seconds; None: ``time.perf_counter``. ``time.process_time`` does not count the time in which
            callables wait for other processes.

    Raises:
        EngineError: no callables, or invalid numbers of rounds.
    """
    if not callables:
        raise EngineError("no engine to time: give at least one")
    if rounds < 1 or warmup < 0:
        raise EngineError(f"rounds is {rounds} and warmup {warmup}: expected 1 or more, and 0 or more")
    names = list(callables)
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin, now = time.perf_counter(), clock or time.perf_counter
    for index in range(-warmup, rounds):
        spent = 0.0 if seconds is None else (time.perf_counter() - begin) / seconds
        if (index >= _MIN_ROUNDS and spent > 1) or (index >= 1 and spent > _FAR_BEYOND):
            break
        if -warmup < index < 0 and spent > _ENOUGH_WARMUP:
            continue
        first = index % len(names)
        for name in names[first:] + names[:first]:
            started = now()
            callables[name]()
            elapsed = now() - started
            if index >= 0:
                samples[name].append(elapsed)
    return samples


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each list of samples, in the samples' unit."""
    return {name: statistics.median(values) for name, values in samples.items()}


def shortest(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the shortest of each list of samples, because other work only adds time.

    Beside a process that kept both cores busy, the lower quartiles of equal engines differed by up to 2x in 100 rounds,
    their shortest times by 8%.
    """
    return {name: min(values) for name, values in samples.items()}


_DISTURBED = 1.15
"""Ratio of the median to the shortest time from which other work disturbs a measurement."""


def is_disturbed(samples: Mapping[str, Sequence[float]]) -> bool:
    """Return whether other work seems to have disturbed the samples of any callable, so that more are needed."""
    return any(statistics.median(values) > _DISTURBED * min(values) for values in samples.values())


_SLICE_S = 0.005
"""Seconds of a call from which another process interrupts nearly every one; some shorter calls are undisturbed."""


def clock_beside_others(seconds: float, threads: int) -> Callable[[], float] | None:
    """Return the clock for more rounds of calls that other work disturbs, as for ``interleaved_latency``.

    For long calls of one thread it is the processor time of this process. It leaves out the time in which a library
    hands work to its own thread, which counts in short calls. Of several threads, it is the sum.

    Args:
        seconds: duration of the shortest call.
        threads: number of CPU threads of each call.
    """
    return time.process_time if threads == 1 and seconds >= _SLICE_S else None


@dataclass(frozen=True)
class PeakMemory:
    """Peak resident memory of a process, in MiB.

    Attributes:
        peak_mib: after loading and running an engine.
        baseline_mib: before that, with the interpreter and the library imported.
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
    """Return the peak resident memory of a fresh process that loads an engine and runs it on generated inputs.

    Args:
        path: the engine file, or an ONNX file for an engine on a CPU.
        backend: name of the backend.
        sizes: sizes of the dynamic dimensions of the inputs.
        threads: number of CPU threads.
        timeout_s: time limit in seconds.

    Raises:
        EngineError: unknown backend; the engine does not load or run, or exceeds ``timeout_s``.
    """
    words = (str(path), threads, asdict(sizes))
    doing = f"measuring the memory of {path}"
    return PeakMemory(**in_own_process("memory", backend, words, doing=doing, timeout_s=timeout_s))


_MAX_VALUES = 2**40
"""Maximum number of values of an input; a damaged file may request more."""


def made_up_inputs(
    specs: Sequence[TensorSpec],
    sizes: InputSizes,
    integer: int = 1,
) -> dict[str, Array]:
    """Return one generated array per input: ones for integers (a valid token id and mask), else small random numbers.

    Shapes: [None, 384] becomes [batch, 384], [None, None] becomes [batch, sequence]; axes with one name get one size.
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
        if prod(shape) > _MAX_VALUES:
            raise EngineError(f"input {spec} would have {prod(shape):.0e} values; a size in the file is wrong")
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else np.full(shape, integer)
        arrays[spec.name] = values.astype(spec.dtype)
    return arrays


def working_inputs(engine: Engine, sizes: InputSizes) -> dict[str, Array]:
    """Return generated inputs that the engine accepts: ones, or zeros if ones fail, as for a table with one row."""
    inputs = made_up_inputs(engine.inputs, sizes)
    try:
        engine(inputs)
    except EngineError as error:
        inputs = made_up_inputs(engine.inputs, sizes, integer=0)
        try:
            engine(inputs)
        except EngineError:
            raise error from None
    return inputs


_RUNS = 3


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        # On Linux, ru_maxrss of a new program starts with the peak of its parent process.
        return int(match[1]) / 1024
    # Bytes on macOS, KiB elsewhere.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _measured_memory(backend: str, path: str, threads: int, sizes: dict[str, Any]) -> dict[str, Any]:
    _prepare(backend)
    baseline_mib = peak_rss_mib()
    # A checksum would add to the memory of the engine.
    engine = load_engine(backend, path, threads=threads, verify=False)
    inputs = working_inputs(engine, InputSizes(**sizes))
    for _ in range(_RUNS):
        engine(inputs)
    return asdict(PeakMemory(peak_mib=peak_rss_mib(), baseline_mib=baseline_mib))


_TRIAL_SIZES = InputSizes(1, 16)
TIMEOUT_S = 600.0
"""Time limit in seconds for a build and its first run."""


def tried_build(
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    *,
    threads: int = 1,
    sizes: InputSizes = _TRIAL_SIZES,
    timeout_s: float | None = None,
) -> BuildResult:
    """Build an engine and run it once on generated inputs, in another process.

    Args:
        backend: name of the backend.
        onnx: the ONNX file to read.
        engine: the engine file to write.
        options: options of a backend on a CPU.
        threads: number of CPU threads.
        sizes: sizes of the dynamic dimensions of the inputs.
        timeout_s: time limit in seconds; None: ``TIMEOUT_S``.
    """
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    words = _trial_words(onnx, engine, options, threads, sizes)
    doing = f"building and running {engine.name} for {backend} in a separate process"
    result = in_own_process("trial", backend, words, doing=doing, timeout_s=timeout_s)
    note_digests(result["native"])
    return BuildResult(engine, result["size_bytes"], result["seconds"], tuple(result["warnings"]))


def begin_build(
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    *,
    threads: int = 1,
    sizes: InputSizes = _TRIAL_SIZES,
) -> None:
    """Begin a build whose result ``tried_build`` with the same arguments returns; do nothing outside a trial process.

    Args: see ``tried_build``.
    """
    begin_in_own_process("trial", backend, _trial_words(onnx, engine, options, threads, sizes))


def has_tried(
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    *,
    threads: int = 1,
    sizes: InputSizes = _TRIAL_SIZES,
    seconds: float = 0.0,
) -> bool:
    """Return whether a build of ``begin_build`` has ended, so that ``tried_build`` returns at once.

    Args:
        seconds: how long to wait for it at most; others: see ``tried_build``.
    """
    words = _trial_words(onnx, engine, options, threads, sizes)
    return (worker := _KEPT.get()) is not None and worker.has_replied(_name("trial", backend, words), seconds)


def _trial_words(onnx: Path, engine: Path, options: BuildOptions, threads: int, sizes: InputSizes) -> list[Any]:
    build_options = {
        "dynamic": dict(options.dynamic),
        "only_sizes": list(map(dict, options.only_sizes)),
        "inference_precision": options.inference_precision,
        "compiled": options.compiled,
    }
    return [str(onnx), str(engine), threads, build_options, asdict(sizes)]


def _trial_build(
    backend: str, onnx: str, engine: str, threads: int, options: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    built = build_engine(backend, onnx, engine, BuildOptions(**options))
    loaded = load_engine(backend, engine, threads=threads, verify=False)
    loaded(working_inputs(loaded, InputSizes(**sizes)))
    return {**asdict(built), "path": str(built.path), "native": built_here()}


def _prepare(backend: str) -> None:
    """Import what a build of a backend needs."""
    library = profile(backend).library
    if library is not None:
        import_library(backend, library)
    if library == "torch":
        # torch imports it at the first symbolic shape, in seconds.
        import_module("torch._dynamo")


_TASKS: Mapping[str, Callable[..., Any]] = {"memory": _measured_memory, "trial": _trial_build, "prepare": _prepare}


if __name__ == "__main__":
    serve(carried_out, (QuantizerError, ImportError))
