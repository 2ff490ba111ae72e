"""The choice of an engine: all candidates for a device, from one calibration, benchmarked in interleaved rounds."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import BuildOptions, BuildResult, Engine, Inspection, inspect_engine, load_engine
from quantizer.engines.for_this_cpu import Variant
from quantizer.engines.measure import (
    clock_beside_others,
    finish_trials,
    has_tried,
    is_disturbed,
    shortest,
    tried_build,
)
from quantizer.export.qdq.onnx_file import output_names
from quantizer.pipeline.benchmark import (
    LATENCY_ROUNDS,
    batches_of_shapes,
    build_options,
    compared_shapes,
    run_sizes,
    times_of,
)
from quantizer.pipeline.compare_outputs import (
    OutputCheck,
    References,
    WrongEngineError,
    check_engine,
    far_from_float,
    first_of_sizes,
    tolerance,
)
from quantizer.pipeline.context import RunContext, Runnable, as_predictor
from quantizer.pipeline.fastest_engine import (
    FAILURES,
    NEVER_FASTER,
    NO_FASTER,
    Calibrated,
    PlanKey,
    RoughTrials,
    bound,
    candidate_line,
    candidates_of,
    choose,
    failed,
    far_behind,
    has_float_work,
    least_ratio,
    named,
    not_built,
    not_compared,
    plan_key,
    quantized_of,
    require_sites,
    rough_engine,
    slow_ones,
    timed,
    variants_of,
)
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM, Graphs
from quantizer.pipeline.run_engines import (
    BuiltEngine,
    RunEngines,
    begin_once,
    built_once,
    export_float,
    export_quantized,
)
from quantizer.pipeline.time_groups import EngineFiles
from quantizer.pipeline.workload import Workload
from quantizer.plan.targets import AUTO, profile
from quantizer.proxy.lower import Lowering, lower
from quantizer.quantizer import Quantizer
from quantizer.report.record import Candidate, EngineChoice
from quantizer.tasks import Batch, batch_shape
from quantizer.utils import gpu
from quantizer.utils.cpu import has_vnni
from quantizer.utils.files import NO_STORE
from quantizer.utils.progress import counted


@dataclass(frozen=True)
class PickedBackend:
    """The chosen backend of a run.

    Attributes:
        config: the configuration with the backend and the build settings of the chosen engine.
        quantizer: its quantizer, from the same calibration; None if nothing is quantized.
        choice: the record of all candidates.
        engines: the engines of the backend: float, and quantized without a fallback.
        fastest_float: name and engine of the fastest float engine of all backends, unless ``engines`` has it.
        checks: comparisons of the quantized engine's outputs, by graph.
        float_checks: comparisons of the float engine's outputs, by graph.
        references: PyTorch's float outputs on the batches of the comparisons, by graph.
    """

    config: RunConfig
    quantizer: Quantizer | None
    choice: EngineChoice
    engines: RunEngines
    fastest_float: tuple[str, Runnable] | None
    checks: Mapping[str, tuple[OutputCheck, ...]]
    float_checks: Mapping[str, tuple[OutputCheck, ...]]
    references: Mapping[str, References]


@dataclass(frozen=True)
class _Checked:
    """A candidate with correct engines.

    Attributes:
        times: its latencies at each size, in milliseconds; empty before they are measured.
    """

    variant: Variant
    candidate: Candidate
    made: Mapping[str, BuiltEngine]
    runs: Runnable
    checks: Mapping[str, tuple[OutputCheck, ...]]
    times: tuple[Sequence[float], ...] = ()


class _Budget:
    """The time that a choice may take; it begins with the choice.

    Args:
        seconds: the time in seconds; None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._began = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """True if the time is over."""
        return self._seconds is not None and time.perf_counter() - self._began > self._seconds

    def __str__(self) -> str:
        return f"the time budget of {self._seconds:g} s was over"


def chooses(config: RunConfig) -> bool:
    """Return whether a run chooses its engine."""
    return config.quantizer.backend == AUTO


def with_backend(config: RunConfig, name: str) -> RunConfig:
    """Return a configuration with this backend and without candidates."""
    return config.model_copy(
        update={"quantizer": config.quantizer.model_copy(update={"backend": name, "candidates": ()})}
    )


def _in_float(config: RunConfig) -> RunConfig:
    """Return the configuration of a run that only builds the engine of the float model."""
    data = config.data.model_copy(update=dict.fromkeys(("calibration", "tuning", "training")))
    return config.model_copy(update={"quantize": False, "data": data, **dict.fromkeys(("amp", "fallback", "qat"))})


def _with_variant(config: RunConfig, variant: Variant, quantizer: Quantizer | None) -> RunConfig:
    """Return the configuration of a run that continues with one variant and its quantizer."""
    ranges = {"ranges": quantizer.config.activations.ranges} if variant.dynamic and quantizer is not None else {}
    activations = config.quantizer.activations.model_copy(update=ranges)
    engine_settings = {"inference_precision": variant.precision, "compiled": variant.compiled}
    chosen = {"backend": variant.backend, "candidates": (), "activations": activations}
    chosen |= {} if variant.dtype is None else {"dtype": variant.dtype}
    return config.model_copy(
        update={
            "quantizer": config.quantizer.model_copy(update=chosen),
            "engine": config.engine.model_copy(update=engine_settings),
        }
    )


def pick_backend(
    work: Workload,
    config: RunConfig,
    calibrated: Calibrated,
    samples: Sequence[Any],
    folder: Path,
    candidates: Sequence[str],
    *,
    fastest: bool,
) -> PickedBackend:
    """Return the backend with the fastest engine, and the record of the choice.

    If a float engine is the fastest, the run continues with its backend, unless that backend has no INT8 engine. With
    ``fastest``, it continues with that engine only.
    """
    context, (_, missing) = work.context, candidates_of(config, candidates)
    variants = variants_of(config, candidates)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, context.timer("choose the engine"):
        batches = batches_of_shapes(context, compared_shapes(config), samples)
        budget = _Budget(config.engine.time_budget)
        maker = _CandidateBuilder(
            work, config, calibrated, batches, samples, Path(scratch), variants, budget, named=bool(candidates)
        )
        correct, rejected = maker.all()
        shapes = _time(correct, rejected, batches, config.engine.threads, work.graphs, budget, on_gpu=maker.is_on_gpu)
        if len(shapes) < len(batches):
            context.timer.tell(f"not timed at {' and '.join(map(_shape, batches[len(shapes) :]))}: {budget}")
        all_candidates = [*(entry.candidate for entry in correct.values()), *rejected]
        where = gpu.description() if maker.is_on_gpu else None
        choice = choose(all_candidates, shapes, missing, maker.float_work(), where)
        choice = bound(choice, lambda candidate: _inspected(context, config, correct[candidate.name]))
        choice = maker.scored(choice, correct)
        best = correct[choice.candidates[0].name]
        if fastest and best.variant.dtype is None:
            config = _in_float(config)
        low, plain = _pair(choice, correct) if config.quantize else (best, None)
        used = maker.quantizers[plan_key(low.variant)] if config.quantize else None
        config = _with_variant(config, low.variant, used)
        both = RunEngines(context, config, folder, work.graphs)
        if plain is not None:
            both.float_name = plain.variant.name
            both.adopt("float", plain.made)
        both.adopt("engine", low.made)
        name = next((entry.name for entry in choice.candidates if entry.is_float and entry.milliseconds), None)
        is_delivered = plain is None or name == both.float_name
        fastest_float = None if name is None or is_delivered else (name, correct[name].runs)
        shown = {"engine": low, **({} if plain is None else {"float": plain})}
        if fastest_float is not None:
            shown[fastest_float[0]] = correct[fastest_float[0]]
        both.timed = {
            batch_shape(batch): {name: one.times[place] for name, one in shown.items() if place < len(one.times)}
            for place, batch in enumerate(batches)
        }
    floats = work.graphs.checked_modules(work.context.model)
    references = {name: of_graph.of_one(floats[name]) for name, of_graph in maker.references.items()}
    float_checks = {} if plain is None else plain.checks
    return PickedBackend(config, used, choice, both, fastest_float, low.checks, float_checks, references)


def _time(
    correct: dict[str, _Checked],
    rejected: list[Candidate],
    batches: Sequence[Batch],
    threads: int,
    graphs: Graphs,
    budget: _Budget,
    *,
    on_gpu: bool = False,
) -> list[str]:
    """Time the candidates at each size, and return the names of the sizes; without time left, at the first two.

    Candidates that fail are moved to ``rejected``. At each size, one round and then a few show which candidates
    are too slow to win; if several are left, these are timed in all rounds. Candidates that are too slow are skipped at
    the last size if it is the largest, where they would take longest.
    """
    shapes: list[str] = []
    values = [sum(value.numel() for value in batch.values()) for batch in batches]
    for place, batch in enumerate(batches, start=1):
        records = [entry.candidate for entry in correct.values()]
        skipped = slow_ones(records) if 1 < place == len(batches) and values[-1] == max(values) else set()
        engines = {name: graphs.timed(entry.runs) for name, entry in correct.items() if name not in skipped}
        if not engines or (place > _ALWAYS_TIMED and budget.is_over):
            break
        take, call = partial(times_of, batch=batch, threads=threads), partial(_called, batch)
        race = _Race({name: entry.candidate for name, entry in correct.items()}, engines, take, call)
        race.run(threads, on_gpu=on_gpu)
        shapes.append(_shape(batch))
        rejected += [failed(correct.pop(name).candidate, why) for name, why in race.broken.items()]
        for name, taken in race.times.items():
            entry = correct[name]
            candidate = replace(entry.candidate, milliseconds=(*entry.candidate.milliseconds, race.shortest[name]))
            correct[name] = replace(entry, candidate=candidate, times=(*entry.times, taken))
    return shapes


class _Race:
    """Interleaved rounds of engines on one batch.

    Args:
        candidates: the candidates by name.
        engines: the engines to time.
        take: returns the latencies of engines in some rounds, in milliseconds.
        call: calls an engine, which raises if it does not run.

    Attributes:
        times: the latencies of the engines that run.
        shortest: the shortest time of each of them. Beside other work, that may be processor time.
        broken: the errors of the others.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        engines: dict[str, Runnable],
        take: Callable[..., dict[str, list[float]]],
        call: Callable[[Runnable], object],
    ) -> None:
        self._candidates = candidates
        self._engines = engines
        self._take = take
        self._call = call
        self.times: dict[str, list[float]] = {}
        self.shortest: dict[str, float] = {}
        self.broken: dict[str, str] = {}

    def run(self, threads: int, *, on_gpu: bool) -> None:
        """Time engines with this number of threads, in the more rounds the nearer they are to the fastest.

        Beside other work, ``clock_beside_others`` measures as many rounds once more. The processor time of a call that
        waits for a GPU says nothing.
        """
        if on_gpu:
            # Kernels are compiled at the first calls with a shape, and a CUDA graph is captured.
            self._add(self._engines, _GPU_WARMUP)
            self.times.clear()
            self.shortest.clear()
        # One round is enough for an engine that takes a multiple of the fastest one's time. A long one needs no warmup.
        measured = self._add(self._engines, 1)
        if (round_s := self._spent()) < _LONG_ROUND_S:
            self.times.clear()
            self.shortest.clear()
            measured = self._add(self._engines, _rounds_in(_SHORT_S, round_s, 1, _FEW_ROUNDS))
        limit = _ONE_ROUND_FROM * min(entry.milliseconds[0] for entry in measured)
        near = {entry.name for entry in measured if entry.milliseconds[0] <= limit} | _delivered_floats(measured)
        measured = self._add(near, _FEW_ROUNDS - 1)
        more = LATENCY_ROUNDS - _FEW_ROUNDS
        disturbed = is_disturbed({name: self.times[name] for name in near & self.times.keys()})
        clock = None if on_gpu else clock_beside_others(min(self.shortest.values()) / 1000, threads)
        # At a size that takes seconds, few rounds are enough.
        if disturbed and self._spent() <= _ENOUGH_S:
            measured = self._add(near, more, clock)
        fast = (self.times.keys() - slow_ones(measured)) | _delivered_floats(measured)
        if len(fast) > 1 and self._spent() <= _ENOUGH_S:
            round_s = sum(self.shortest[name] for name in fast) / 1000
            rounds = _rounds_in(_SHORT_S, round_s, more, _MOST_ROUNDS)
            self._add(fast, rounds)
            if disturbed:
                self._add(fast, rounds, clock)

    def _add(self, names: Collection[str], rounds: int, clock: Callable[[], float] | None = None) -> list[Candidate]:
        """Time engines in more rounds, and return the candidates with their shortest times so far."""
        some = {name: one for name, one in self._engines.items() if name in names and name not in self.broken}
        taken, failures = timed(some, partial(self._take, rounds=rounds, warmup=0, clock=clock), self._call)
        self.broken.update(failures)
        for name, least in shortest(taken).items():
            self.shortest[name] = min(least, self.shortest.get(name, least))
            if clock is None:
                self.times[name] = [*self.times.get(name, ()), *taken[name]]
        for name in failures:
            self.times.pop(name, None)
            self.shortest.pop(name, None)
        return [
            replace(self._candidates[name], milliseconds=(milliseconds,))
            for name, milliseconds in self.shortest.items()
        ]

    def _spent(self) -> float:
        """Return the time of all rounds so far in seconds."""
        return sum(map(sum, self.times.values())) / 1000


def _rounds_in(seconds: float, round_s: float, least: int, most: int) -> int:
    """Return how many rounds of this length take these seconds, within limits."""
    return max(least, min(most, int(seconds / max(round_s, 1e-9))))


def _delivered_floats(measured: Sequence[Candidate]) -> set[str]:
    """Return the names of the float engines that the report may show beside the winner, however slow they are."""
    by_time = sorted(measured, key=lambda entry: entry.milliseconds[0])
    floats = [entry for entry in by_time if entry.is_float]
    low = next((entry for entry in by_time if not entry.is_float), None)
    same = [entry for entry in floats if low is not None and entry.backend == low.backend]
    return {entry.name for entry in (*floats[:1], *same[:1])}


_POLL_S = 0.1
"""Seconds between two looks at the builds of another process."""

_ALWAYS_TIMED = 2
"""Number of sizes that are timed although the time budget is over."""

_SCORED = 1.1
"""Latency relative to the fastest quantized candidate up to which another one is scored."""

_FEW_ROUNDS, _ENOUGH_S, _LONG_ROUND_S = 3, 4.0, 1.0
"""Interleaved rounds that show which candidates are too slow, the seconds after which no others follow, and those of a
round that is no warmup.
"""

_GPU_WARMUP = 3
"""Calls of an engine for a GPU that are not timed at each size."""

_SHORT_S, _MOST_ROUNDS = 0.3, 100
"""The seconds that short calls are timed, because a disturbance may last longer than a few of them, and the most rounds
for that.
"""

_ONE_ROUND_FROM = 3.0
"""Latency relative to the fastest candidate from which one round is enough.

Beside other work, a call may take twice its time.
"""


def _shape(batch: Batch) -> str:
    size, sequence = batch_shape(batch)
    return f"batch {size}" if sequence is None else f"{size} x {sequence}"


class _CandidateBuilder:
    """Builder of the candidates of a run."""

    def __init__(
        self,
        work: Workload,
        config: RunConfig,
        calibrated: Calibrated,
        batches: Sequence[Batch],
        samples: Sequence[Any],
        folder: Path,
        variants: Sequence[Variant],
        budget: _Budget,
        *,
        named: bool,
    ) -> None:
        self._budget = budget
        self.quantizers = dict(calibrated)
        self._named_by_user = named
        self._variants = variants
        self._begun: set[str] = set()
        self._early: dict[str, tuple[Callable[[], _Checked], float]] = {}
        self._context = work.context
        self._graphs = work.graphs
        self._config = config
        self._calibrated = next(iter(calibrated.values()), None)
        self._scoring = work.scorer
        self._batches = batches
        self._folder = folder
        self._kept = work.context.resume.engines
        self._scored_rows = work.scored_rows
        self._frozen: dict[PlanKey, nn.Module] = {}
        self._lowered: dict[PlanKey, nn.Module] = {}
        self.is_on_gpu = profile(config.quantizer.backend).device == "cuda"
        self._trials = RoughTrials(self._borrowed, self._rough, batches, config.engine.threads)
        self.references = {
            name: References(batches, apart=work.context.feed.samples_independent)
            for name, batches in work.graphs.checked_on(config, samples).items()
        }

    def all(self) -> tuple[dict[str, _Checked], list[Candidate]]:
        """Return the correct candidates by name, and the records of the others."""
        correct: dict[str, _Checked] = {}
        rejected: list[Candidate] = []
        fallback = self._config.fallback
        budget = fallback is not None and fallback.max_drop is not None
        names, begun, wrong = [variant.name for variant in self._variants], set[str](), set[str]()
        self._plan_first()
        with counted(self._variants, "candidates", unit="engine", note=named) as steps:
            for variant in steps:
                candidate, start = Candidate(backend=variant.backend, format=variant.format), time.perf_counter()
                if variant.dynamic and not budget and f"{variant.backend} {variant.dtype}" in correct:
                    rejected.append(not_built(candidate, NO_FASTER))
                    continue
                if variant.is_spare and replace(variant, precision=None).name not in wrong:
                    continue
                why = None if variant.backend in begun else self._not_begun(variant.backend, correct)
                if why is None:
                    begun.add(variant.backend)
                try:
                    hopeless = self._hopeless(variant, candidate, why, correct)
                    if hopeless is None:
                        make, seconds = self._early.pop(variant.name, (partial(self._tried, variant, candidate), 0.0))
                        start -= seconds
                        correct[variant.name] = make()
                        candidate = correct[variant.name].candidate
                    else:
                        candidate = hopeless
                        rejected.append(candidate)
                except FAILURES as error:
                    wrong |= {variant.name} if isinstance(error, WrongEngineError) else set()
                    candidate = failed(candidate, error)
                    rejected.append(candidate)
                self._context.timer.tell(candidate_line(candidate, names, time.perf_counter() - start))
        finish_trials()
        return correct, rejected

    def _plan_first(self) -> None:
        """Make the plan of the first backend while its float engines are built and compared with the model.

        Its INT8 engines are begun next.
        """
        first = next(iter(self._variants), None)
        if first is None or first.dtype is not None or self._graphs.several:
            return
        own = (variant for variant in self._variants if variant.backend == first.backend)
        static = next((variant for variant in own if variant.dtype is not None and not variant.dynamic), None)
        if static is not None:
            # At their own turns, errors are reported.
            with suppress(*FAILURES):
                files = self._exported(first)[1]
                self._begin(first, files)
                with self._floats_compared(first, files):
                    static_files = self._exported(static)[1]
                self._begin(static, static_files)
                self._begin_trial(static)

    @contextmanager
    def _floats_compared(self, first: Variant, files: Mapping[str, Path]) -> Iterator[None]:
        """Compare the float engines of a backend in another thread, as they are built, until the block ends.

        What came of it counts at the engine's turn. One that is not built in time is tried then.
        """
        # Torch's backends change the warning filters of the process, as the block does.
        if self.is_on_gpu or profile(first.backend).library == "torch":
            yield
            return
        floats = [variant for variant in self._variants if (variant.backend, variant.dtype) == (first.backend, None)]
        for graph, module in self._graphs.checked_modules(self._context.model).items():
            # The model itself runs in this thread only.
            self.references[graph].of(module, output_names(files[graph]))
        (graph,), ended = self._graphs.names, threading.Event()

        def compare() -> None:
            for variant in floats:
                options, more = self._options(variant, graph)
                built = variant.backend, files[graph], self._place(variant, graph), options
                while not has_tried(*built, **more, seconds=_POLL_S):
                    if ended.wait(_POLL_S):
                        return
                outcome, begun = Future[_Checked](), time.perf_counter()
                try:
                    outcome.set_result(self._tried(variant, Candidate(backend=variant.backend, format=variant.format)))
                except FAILURES as error:
                    outcome.set_exception(error)
                self._early[variant.name] = outcome.result, time.perf_counter() - begun
                if ended.is_set():
                    return

        with ThreadPoolExecutor(1, thread_name_prefix="compare") as pool:
            comparison = pool.submit(copy_context().run, compare)
            try:
                yield
            finally:
                ended.set()
            comparison.result()

    def scored(self, choice: EngineChoice, correct: Mapping[str, _Checked]) -> EngineChoice:
        """Return a choice with the scores of the fast quantized candidates; float engines are only compared."""
        low = [entry for entry in choice.candidates if not entry.is_float and entry.milliseconds]
        near = {entry.name for entry in low if entry.times_of(low[0]) <= _SCORED and not self._graphs.several}
        candidates = [
            replace(entry, score_difference=self._difference(correct[entry.name])) if entry.name in near else entry
            for entry in choice.candidates
        ]
        return replace(choice, candidates=tuple(candidates))

    def float_work(self) -> set[str]:
        """Return the backends whose quantized engines have multiply-adds in floating point."""
        return {key[0] for key in self._frozen if has_float_work(self.quantizers[key])}

    def _not_begun(self, backend: str, correct: Mapping[str, _Checked]) -> str | None:
        """Return why a backend is not tried, if an engine of the right format exists; None if it is tried."""
        if not any((entry.variant.dtype is not None) == self._config.quantize for entry in correct.values()):
            return None
        if self._is_never_faster(backend):
            return NEVER_FASTER
        return str(self._budget) if self._budget.is_over else None

    def _is_never_faster(self, backend: str) -> bool:
        return has_vnni() and profile(backend).library == "torch" and not self._named_by_user

    def _difference(self, entry: _Checked) -> float | None:
        # The samples of a function are unknown, so its score cannot be cached.
        store = self._kept if self._scored_rows is not None else NO_STORE
        key = ["difference", self._scored_rows, entry.made[self._graphs.names[0]].built.path]
        return store.get(key, partial(self._scoring.difference, entry.variant.name, entry.runs))

    def _tried(self, variant: Variant, candidate: Candidate) -> _Checked:
        """Export, build and check one candidate."""
        graphs, model = self._graphs, self._context.model
        frozen, files = self._exported(variant)
        self._begin(variant, files)
        expected, plain = graphs.checked_modules(self._with_kernels(variant, frozen)), graphs.checked_modules(model)
        simulated = graphs.checked_modules(frozen)
        for graph in () if graphs.several else graphs.names:
            # PyTorch computes while the engine is built.
            names, references = output_names(files[graph]), self.references[graph]
            references.of(plain[graph], names)
            references.of(expected[graph], names, simulated[graph])
        engines_of_graph: dict[str, BuiltEngine] = {}
        for graph in graphs.names:
            place = self._place(variant, graph)
            built, engine = self._built(variant, files[graph], place, graph)
            engines_of_graph[graph] = BuiltEngine(EngineFiles(onnx=files[graph], engine=place), built, engine)
        computed = getattr(torch, variant.computed)
        bound = tolerance(self._config.report.tolerance, variant.dtype is not None, computed)
        timed: list[OutputCheck] = []
        checks_of_graph: dict[str, tuple[OutputCheck, ...]] = {}
        engines = {graph: entry.engine for graph, entry in engines_of_graph.items()}
        for graph, engine in graphs.checked_as(engines).items():
            names, references = engine.output_names, self.references[graph]
            right, of_float = (
                references.of(expected[graph], names, simulated[graph]),
                references.of(plain[graph], names),
            )
            # If a float32 engine computes the same, one batch shows it: its error is far below the bound.
            if variant.dtype is None and computed == torch.float32:
                right, of_float = first_of_sizes(right), first_of_sizes(of_float)
            checks = check_engine(engine, right, of_float, bound)
            # Only the timed size, which is the first: at others, texts may be longer than all calibration samples.
            timed += [check for check in checks if check.size == checks[0].size]
            checks_of_graph[graph] = tuple(checks)
        measured = replace(candidate, sqnr_db=far_from_float(timed))
        return _Checked(variant, measured, engines_of_graph, graphs.assembled(engines), checks_of_graph)

    def _with_kernels(self, variant: Variant, frozen: nn.Module) -> nn.Module:
        """Return a module with the outputs of a frozen proxy, up to the order of float sums, in less time."""
        key = plan_key(variant)
        if variant.dtype != "int8" or self._graphs.several or not has_vnni():
            return frozen
        if key not in self._lowered:
            self._lowered[key] = frozen
            # ``Quantizer.lower`` warns if there is no kernel. A failure of torch's kernels is none of this backend.
            with suppress(*FAILURES):
                self._lowered[key] = lower(self.quantizers[key].quantize(self._context.model), Lowering())
        return self._lowered[key]

    def _begin(self, variant: Variant, files: Mapping[str, Path]) -> None:
        """Begin to build the candidates of the variant's backend that have the same files."""
        for other in self._variants:
            if plan_key(other) == plan_key(variant) and not other.is_spare and other.name not in self._begun:
                self._begun.add(other.name)
                for graph, onnx in files.items():
                    options, more = self._options(other, graph)
                    begin_once(self._kept, other.backend, onnx, self._place(other, graph), options, **more)

    def _begin_next(self) -> None:
        """Begin to build the float engines of the next backend, while this process makes a plan."""
        waiting = (variant for variant in self._variants if variant.name not in self._begun and not variant.is_spare)
        following = next((variant for variant in waiting if variant.dtype is None), None)
        if following is not None and not self._is_never_faster(following.backend):
            self._begin(following, self._exported(following)[1])

    def _place(self, variant: Variant, graph: str) -> Path:
        """Return the engine file of a variant, in a folder that exists."""
        place = self._graphs.files(self._folder / variant.file_name, QUANTIZED_STEM, graph).engine
        place.parent.mkdir(exist_ok=True)
        return place

    def _options(self, variant: Variant, graph: str) -> tuple[BuildOptions, dict[str, Any]]:
        """Return the build options of a variant, and the other arguments of its trial."""
        config = self._config
        options = replace(
            build_options(config, self._graphs.dimensions(config, graph)),
            inference_precision=variant.precision,
            compiled=variant.compiled,
        )
        sizes = run_sizes(config, self._context)
        if self._graphs.several:
            dynamic = config.export.dynamic
            sizes = replace(sizes, batch=dynamic.batch[0], sequence=dynamic.sequence[0])
        return options, {"threads": config.engine.threads, "sizes": sizes}

    def _built(self, variant: Variant, onnx: Path, path: Path, graph: str) -> tuple[BuildResult, Engine]:
        options, more = self._options(variant, graph)
        built = built_once(self._kept, tried_build, variant.backend, onnx, path, options, **more)
        return built, load_engine(variant.backend, built.path, threads=self._config.engine.threads)

    def _hopeless(
        self, variant: Variant, candidate: Candidate, why: str | None, tried: Mapping[str, _Checked]
    ) -> Candidate | None:
        """Return the record of a candidate that cannot win, so that it is not tried further; None if it may.

        ``why`` is a reason that is known before.
        """
        if why := why or self._too_slow(variant, tried):
            return not_built(candidate, why)
        why = self._far_behind(variant, tried)
        return None if why is None else not_compared(candidate, why)

    def _far_behind(self, variant: Variant, tried: Mapping[str, _Checked]) -> str | None:
        """Return why a float engine is too slow to be compared with the model; None if it may be the fastest."""
        graph = self._graphs.names[0]
        rivals = {
            name: entry.made[graph].engine
            for name, entry in tried.items()
            if entry.variant.dtype is None and entry.variant.backend != variant.backend
        }
        if variant.dtype is not None or self._graphs.several or not rivals:
            return None
        files = self._exported(variant)[1]
        self._begin(variant, files)
        engine = self._built_for_trial(variant, files[graph], self._place(variant, graph))
        return far_behind(variant.name, engine, rivals, self._batches[0], self._config.engine.threads)

    def _too_slow(self, variant: Variant, tried: Mapping[str, _Checked]) -> str | None:
        """Return why a backend is too slow to need a plan; None if it needs one, or has one."""
        has_plan = variant.dtype is None or (variant.backend, variant.dtype, False) in self.quantizers
        # A file for TensorRT is not one for torch, and plans of a GPU's formats differ.
        if self._calibrated is None or has_plan or self._graphs.several or self.is_on_gpu:
            return None
        quantized = {name: entry for name, entry in tried.items() if entry.variant.dtype is not None}
        rivals = {name: entry.made[self._graphs.names[0]].engine for name, entry in quantized.items()}
        planned = {backend for backend, _, dynamic in self._frozen if not dynamic}
        return self._trials.too_slow(variant, self._calibrated, rivals, planned)

    def _begin_trial(self, planned: Variant) -> None:
        """Begin to build the first trial of the next backend, from the file of a variant that has a plan."""
        others = (variant for variant in self._variants if variant.backend != planned.backend)
        following = next((variant for variant in others if variant.dtype is not None and not variant.dynamic), None)
        assert self._calibrated is not None
        if following is None or self._is_never_faster(following.backend) or self.is_on_gpu:
            return
        if least_ratio(self._calibrated.config, following.backend, {planned.backend}) is not None:
            (graph,), (file,) = self._graphs.names, self._exported(planned)[1].values()
            options, more = self._options(following, graph)
            begin_once(self._kept, following.backend, file, self._borrowed_file(following), options, **more)

    def _borrowed(self, variant: Variant, other: str) -> Engine:
        (owner,) = (owner for owner in self._variants if owner.name == other)
        (file,) = self._exported(owner)[1].values()
        return self._built_for_trial(variant, file, self._borrowed_file(variant))

    def _borrowed_file(self, variant: Variant) -> Path:
        """Return the engine file of a backend's first trial."""
        return self._folder / f"{variant.backend}-borrowed.engine"

    def _built_for_trial(self, variant: Variant, onnx: Path, path: Path) -> Engine:
        (graph,) = self._graphs.names
        engine = self._built(variant, onnx, path, graph)[1]
        # The engine is timed next.
        finish_trials()
        return engine

    def _rough(self, variant: Variant, calibrated: Quantizer) -> Engine:
        build = partial(self._built_for_trial, variant)
        context, name, opset = self._context, variant.backend, self._config.export.opset
        stem, example = self._folder / f"{name}-rough", context.feed.example()
        return rough_engine(calibrated, name, context.model, example, stem, build, opset, context.feed.sizes)

    def _exported(self, variant: Variant) -> tuple[nn.Module, dict[str, Path]]:
        """Return the frozen proxy or the float model, and the ONNX file of each graph; both are cached."""
        graphs, opset, key = self._graphs, self._config.export.opset, plan_key(variant)
        kind = f"{variant.backend}-{variant.dtype}{'-dynamic' if variant.dynamic else ''}"
        dtype = profile(variant.backend).float_model_dtype
        floats = FLOAT_STEM if dtype is torch.float32 else f"{FLOAT_STEM}-16"
        folder = self._folder / (floats if variant.dtype is None else f"{kind}-files")
        files = {graph: graphs.files(folder, QUANTIZED_STEM, graph).onnx for graph in graphs.names}
        for file in files.values():
            file.parent.mkdir(exist_ok=True)
        if variant.dtype is None:
            # All variants share one file of the float model in a type.
            for graph, file in files.items():
                if not file.exists():
                    export_float(self._context, graphs, graph, opset, file, dtype)
            return self._context.model, files
        proxy = self._proxy(variant)
        if not all(file.exists() for file in files.values()):
            export_quantized(self.quantizers[key], graphs, proxy, files, opset, self._kept)
        return proxy, files

    def _proxy(self, variant: Variant) -> nn.Module:
        """Return the frozen proxy of a quantized variant; it is cached."""
        key = plan_key(variant)
        if key not in self._frozen:
            if key not in self.quantizers:
                ranges = "dynamic" if variant.dynamic else None
                assert self._calibrated is not None
                made = self._calibrated.for_backend(variant.backend, ranges=ranges, dtype=variant.dtype)
                self.quantizers[key] = made
            self._begin_next()
            if variant.dynamic or self.is_on_gpu:
                require_sites(self.quantizers[key])
            self._frozen[key] = self.quantizers[key].quantize(self._context.model)
            self._context.timer.tell_passes(self.quantizers[key].passes)
        return self._frozen[key]


def _called(batch: Batch, runs: Runnable) -> object:
    return as_predictor(runs)(batch)


def _inspected(context: RunContext, config: RunConfig, entry: _Checked) -> Inspection:
    *_, last = entry.made.values()
    return inspect_engine(
        entry.variant.backend,
        last.built.path,
        threads=config.engine.threads,
        sizes=run_sizes(config, context),
    )


def _pair(choice: EngineChoice, correct: dict[str, _Checked]) -> tuple[_Checked, _Checked | None]:
    """Return the quantized engine of the fastest backend with quantized engines, and the matching float engine.

    The float engine is the fastest of that backend. If a quantized engine won, a float engine with the precision of its
    non-quantized operations is preferred, because latency costs are measured against it.
    """
    ran = [correct[entry.name] for entry in choice.candidates if entry.milliseconds]
    low = [correct[entry.name] for entry in quantized_of(choice)]
    best = ran[0]
    chosen = next((entry for entry in low if entry.variant.backend == best.variant.backend), low[0])
    plain = [entry for entry in ran if entry.variant.dtype is None and entry.variant.backend == chosen.variant.backend]
    if best.variant.dtype is not None:
        plain.sort(key=lambda entry: entry.variant.precision != chosen.variant.precision)
    return chosen, plain[0] if plain else None
