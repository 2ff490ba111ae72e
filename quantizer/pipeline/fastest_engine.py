"""The fastest correct engine: the variants to try, the choice by measured latency, and rough trials.

A rough trial builds an engine from a plan that takes a moment. The latency of an engine depends on the quantized
operations, and hardly on their ranges. So an engine that is far too slow with rough ranges does not need a good plan,
which takes most of the time of a choice. Whether MatMuls of two activations and residual additions are quantized
depends on the good plan, so that a rough plan says less about backends with kernels for them. A backend that shares its
plan with another backend needs no trial.

A first trial needs no plan at all: the backend runs the file of another backend, and is dropped from 1.3x on. In such a
file some of its own operations are in float, or it converts more often. For seven models, the time was 0.7 to 1.6 times
that with a rough plan; at 1.6, for a U-Net, the other backend was far ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeAlias, TypeVar

from torch import nn

from quantizer.algorithms.make_plan import keeps_batches, replays_batches
from quantizer.config import QuantizerConfig, RunConfig
from quantizer.config.layouts import needs_static
from quantizer.engines import Engine, Inspection, interleaved_latency
from quantizer.engines.candidates import usable_backends
from quantizer.engines.for_this_cpu import Variant, cpu_variants
from quantizer.engines.measure import clock_beside_others, is_disturbed, shortest
from quantizer.errors import EngineError, LostRankError, QuantizerError
from quantizer.pipeline.context import engine_inputs
from quantizer.plan.targets import profile
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine, text
from quantizer.report.record import TIE, Candidate, EngineChoice
from quantizer.settings import settings_of
from quantizer.tasks import Batch
from quantizer.utils.cpu import cpu_flags, has_vnni, saturates
from quantizer.utils.distributed import alone, get_world_size
from quantizer.utils.sizes import DataSizes

FAILURES = (QuantizerError, RuntimeError)
"""Errors that disqualify one candidate only; libraries raise the second."""

HOPELESS = 1.1
"""Slowdown from which a quantized engine is dropped: fallback, dynamic ranges or better ranges gain a few percent
only.
"""

NO_FASTER = "no faster than int8"
"""The reason why an engine with dynamic ranges is not built.

It loses less accuracy, which counts under a budget, but is at most 3% faster than the engine with static ranges.
"""

NEVER_FASTER = "with VNNI, it was slower in all our benchmarks; name it to compare it"
"""The reason why torch is not tried on a CPU with VNNI beside a correct engine of another backend.

See benchmarks/results/cpu-speed.md: it takes 1.2 times the time of the fastest INT8 engine or more.
"""

_REST_TIE = 1.05
"""Ratio of latencies below which noise may decide between float32 and BF16 for the other operations of an INT8 engine.

Then they stay in float32, which is more accurate, unless more than ``_FLOAT_WORK`` of the multiply-adds are among them.
"""

_FLOAT_WORK, _FLOAT_WORK_TIE = 0.001, 1.1
"""Share of multiply-adds in floating point from which an INT8 engine gains from BF16, and the ratio of latencies up to
which it then has BF16.

The share grows with the length if attention stays in float: 0.6% for MiniLM at 20 tokens, 5% at 128, where BF16 gains
10%. At the length of the samples both are about equally fast, and a busy neighbor moves the ratio by 5%.
"""

SLOW = 1.3
"""Slowdown from which a candidate is not timed at further sizes."""

_INT8_FLAGS = frozenset({"avx2", "amx_int8", "asimddp", "i8mm"})

Times = TypeVar("Times")
Timed = TypeVar("Timed")


def choose(
    candidates: Sequence[Candidate],
    shapes: Sequence[str],
    missing: Sequence[str],
    float_work: Collection[str] = (),
    gpu: str | None = None,
) -> EngineChoice:
    """Return the choice of the fastest candidate, by the geometric mean of latency ratios over all sizes.

    Among candidates of one format that are about equally fast, the first one wins, so that repeated runs agree.

    Args:
        candidates: all candidates in the order of trial. Failed ones have no latencies and a reason in ``verdict``.
            Those that were too slow have the latencies of the first sizes.
        shapes: the names of the sizes.
        missing: backends that do not run here, with the reasons.
        float_work: the backends whose quantized engines have multiply-adds in floating point, which gain from BF16.
        gpu: the GPU that the candidates run on; None: they run on the CPU.
    """
    ran = sorted(
        (candidate for candidate in candidates if len(candidate.milliseconds) == len(shapes) > 0), key=_mean_time
    )
    slow = [candidate for candidate in candidates if 0 < len(candidate.milliseconds) < len(shapes)]
    failures = [candidate for candidate in candidates if not candidate.milliseconds]
    if not ran:
        reasons = "; ".join(f"{candidate.name}: {candidate.verdict}" for candidate in failures)
        raise EngineError(f"no engine is correct and runs on this machine: {reasons}")
    ran = _without_noise(ran, list(candidates).index, float_work)
    best = ran[0]
    slower = [replace(candidate, verdict=f"{text.times(candidate.times_of(best))} the time") for candidate in ran[1:]]
    for candidate in sorted(slow, key=lambda candidate: candidate.times_of(best)):
        sizes = " and ".join(shapes[: len(candidate.milliseconds)])
        slower.append(
            replace(
                candidate, verdict=f"{text.times(candidate.times_of(best))} the time at {sizes}: too slow to continue"
            )
        )
    return EngineChoice(
        headline=_headline(ran, gpu),
        instructions=None if gpu is not None else str(collect_machine()["instructions"] or "") or None,
        gpu=gpu,
        shapes=tuple(shapes),
        candidates=(replace(best, verdict="chosen"), *slower, *failures),
        missing=tuple(missing),
    )


def _without_noise(
    ran: list[Candidate], tried: Callable[[Candidate], int], float_work: Collection[str]
) -> list[Candidate]:
    """Return candidates by speed; of ties for the fastest, float comes first, and of one format the first one tried.

    Of an INT8 engine with multiply-adds in floating point, BF16 comes first: at sizes that are not timed it gains more.
    """
    order = list(ran)
    for is_float in (True, False):
        best = next((entry for entry in ran if entry.is_float is is_float), None)
        if best is not None:
            start = order.index(best)
            rest_tie = _FLOAT_WORK_TIE if best.backend in float_work else _REST_TIE
            tied = list(takewhile(partial(_is_tied, best, rest_tie=rest_tie), order[start:]))
            chosen = min(tied, key=tried)
            if not is_float and chosen.backend in float_work:
                own = (entry for entry in tied if entry.backend == chosen.backend)
                chosen = next((entry for entry in own if "+" in entry.format), chosen)
            order.insert(start, order.pop(order.index(chosen)))
    plain = next((entry for entry in order if entry.is_float), None)
    if plain is not None and plain.times_of(ran[0]) < TIE:
        # A float engine is more accurate than a quantized one that is no faster.
        order.insert(0, order.pop(order.index(plain)))
    return order


def _is_tied(best: Candidate, other: Candidate, rest_tie: float) -> bool:
    """Return whether noise may decide between two candidates of one format, or between two rests of one INT8 engine."""
    if other.backend == best.backend and other.format.partition("+")[0] == best.format.partition("+")[0]:
        return other.times_of(best) < rest_tie
    return other.format == best.format and other.times_of(best) < TIE


def has_float_work(quantizer: Quantizer) -> bool:
    """Return whether the engine of a plan gains from BF16, because it has multiply-adds in floating point."""
    share = quantizer.coverage.share
    return share is not None and 1 - share > _FLOAT_WORK


def slow_ones(candidates: Sequence[Candidate]) -> set[str]:
    """Return the names of candidates that cannot become the fastest, or the fastest quantized one, at more sizes."""
    ran = sorted((entry for entry in candidates if entry.milliseconds), key=_mean_time)
    low = [entry for entry in ran if not entry.is_float]
    rivals = {True: ran, False: low}
    return {entry.name for entry in ran if entry.times_of(rivals[entry.is_float][0]) >= SLOW}


def timed(
    engines: dict[str, Timed], time: Callable[[dict[str, Timed]], Times], call: Callable[[Timed], object]
) -> tuple[Times, dict[str, str]]:
    """Return the latencies of the engines that run, and the errors of the others by name."""
    try:
        return time(engines), {}
    except FAILURES:
        broken = {}
        for name, engine in engines.items():
            try:
                call(engine)
            except FAILURES as error:
                broken[name] = str(error)
        if not broken:
            raise
    return time({name: engine for name, engine in engines.items() if name not in broken}), broken


def quantized_of(choice: EngineChoice) -> list[Candidate]:
    """Return the quantized candidates that ran, in the order of the choice."""
    low = [entry for entry in choice.candidates if not entry.is_float]
    ran = [entry for entry in low if entry.milliseconds]
    if not ran:
        reasons = "; ".join(f"{entry.name}: {entry.verdict}" for entry in low)
        raise EngineError(f"no quantized engine is correct and runs on this machine: {reasons}")
    return ran


def require_sites(quantizer: Quantizer) -> None:
    """Raise if a plan quantizes nothing, for example if no site fits dynamic-range kernels."""
    if not quantizer.coverage.share:
        raise EngineError(
            "no operation of this model can be quantized in this way; the engine would compute everything in float"
        )


def candidate_line(candidate: Candidate, names: Sequence[str], seconds: float) -> str:
    """Return one line on an untimed candidate: SQNR and score relative to float.

    Args:
        candidate: the candidate; a failed candidate has a reason in its verdict.
        names: the names of all candidates, for aligned columns.
        seconds: the duration of build, check and score in seconds.
    """
    name = candidate.name.ljust(max(map(len, names)))
    if candidate.verdict:
        return f"{name}  {candidate.verdict}"
    near = "equal to float" if candidate.sqnr_db is None else f"{text.decibels(candidate.sqnr_db):>5} dB"
    scored = "" if candidate.score_difference is None else f"  {text.signed(candidate.score_difference):>7}"
    return f"{name}  {near}{scored}  {seconds:5.1f} s"


def named(variant: Variant) -> str:
    """Return the progress note of a candidate."""
    return f"now {variant.name}"


def not_built(candidate: Candidate, why: str) -> Candidate:
    """Return the record of a candidate that cannot win."""
    return replace(candidate, milliseconds=(), verdict=f"not built: {why}")


def not_compared(candidate: Candidate, why: str) -> Candidate:
    """Return the record of a candidate that was built, but cannot win."""
    return replace(candidate, milliseconds=(), verdict=f"not compared: {why}")


def failed(candidate: Candidate, why: object) -> Candidate:
    """Return the record of a failed candidate."""
    return replace(candidate, milliseconds=(), verdict=f"failed: {why}")


def _mean_time(candidate: Candidate) -> float:
    """Return the geometric mean of the latencies; ratios of such means do not depend on a reference."""
    return math.exp(sum(map(math.log, candidate.milliseconds)) / len(candidate.milliseconds))


def _headline(ran: Sequence[Candidate], gpu: str | None) -> str:
    """Return a sentence on the fastest candidate and the fastest float candidate."""
    best = ran[0]
    floats = [candidate for candidate in ran if candidate.is_float]
    quantized = [candidate for candidate in ran if not candidate.is_float]
    if best.is_float and quantized:
        times = quantized[0].times_of(best)
        formats, where = ("INT8", "this CPU") if gpu is None else ("INT8 or FP8", "this GPU")
        return (
            f"no {formats} engine is {'clearly ' if times < 1 else ''}faster than float on {where}, so {best.name} is "
            f"delivered: {quantized[0].name} takes {text.times(times)} its time"
        )
    sentence = (
        f"{best.name} is {'the fastest' if all(entry.times_of(best) >= 1 for entry in ran) else 'as fast as any'}"
    )
    return sentence if best.is_float or not floats else f"{sentence}; in float it is {floats[0].name}"


def bound(choice: EngineChoice, inspect: Callable[[Candidate], Inspection]) -> EngineChoice:
    """Return the choice; if float won over INT8, its headline says where the fastest INT8 engine spends its time."""
    best, *others = choice.candidates
    slower = [entry for entry in others if not entry.is_float and len(entry.milliseconds) == len(choice.shapes)]
    if not best.is_float or not slower or choice.gpu is not None:
        return choice
    try:
        shares = inspect(slower[0]).shares
    except FAILURES:
        shares = ()
    time_shares = {share.precision: share.time_share for share in shares if share.time_share is not None}
    shares_text = [f"{text.percent(share)} in {precision}" for precision, share in time_shares.items()]
    why = f"This CPU ({choice.instructions or 'of unknown instructions'}){_what_it_lacks()}"
    why = f"{why}; the time of {slower[0].name} is spent {', '.join(shares_text)}" if shares_text else why
    return replace(choice, headline=f"{choice.headline}. {why}")


def _what_it_lacks() -> str:
    """Return words on the INT8 instructions of this CPU; empty if unknown."""
    flags = cpu_flags()
    if saturates():
        return " has no VNNI, and needs several instructions for INT8"
    if has_vnni():
        return " has VNNI"
    return " has no instructions for INT8: neither AVX2 nor VNNI" if flags and flags.isdisjoint(_INT8_FLAGS) else ""


PlanKey: TypeAlias = tuple[str, str | None, bool]
"""What the plan of a quantizer is for: backend, format, and whether ranges are dynamic."""

Calibrated: TypeAlias = dict[PlanKey, Quantizer]
"""Quantizers of one calibration; the calibrated one comes first."""


def plan_key(variant: Variant) -> PlanKey:
    """Return the key of a quantized variant's plan."""
    return variant.backend, variant.dtype, variant.dynamic


def candidates_of(config: RunConfig, candidates: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the backends to try on the device of a configuration, and why others do not run."""
    return usable_backends(candidates, config.quantizer.target_on(config.engine.device or "cpu").device)


def variants_of(config: RunConfig, candidates: Sequence[str]) -> Sequence[Variant]:
    """Return the engine variants to try; without names, all for the device."""
    settings, (names, _) = config.quantizer, candidates_of(config, candidates)
    if profile(names[0]).device == "cuda":
        from quantizer.engines.for_this_gpu import gpu_variants

        dtypes = (settings.dtype,) if "dtype" in settings.model_fields_set else ("int8", "fp8")
        return gpu_variants(
            names,
            dtypes=dtypes if config.quantize else (),
            precision=config.engine.inference_precision,
            compiled=config.engine.compiled,
        )
    return cpu_variants(
        names,
        dtype=settings.dtype if config.quantize else None,
        precision=config.engine.inference_precision,
        # QAT trains the ranges, and some layouts have no others than those of calibration.
        dynamic="ranges" not in settings.activations.model_fields_set
        and config.qat is None
        and not needs_static(config),
        compiled=config.engine.compiled,
        named=bool(candidates),
    )


def for_all_variants(config: RunConfig, calibrated: Quantizer, candidates: Sequence[str]) -> Calibrated:
    """Return the quantizers of all candidate backends for several processes.

    All processes choose ranges together. A single process makes each quantizer when it tries the engine.
    """
    quantizers: Calibrated = {(calibrated.config.backend, calibrated.config.dtype, False): calibrated}
    for variant in variants_of(config, candidates) if get_world_size() > 1 else ():
        key = (variant.backend, variant.dtype, False)
        if variant.dtype is not None and key not in quantizers:
            try:
                quantizer = calibrated.for_backend(variant.backend, dtype=variant.dtype)
                _ = quantizer.plan
            except LostRankError:
                raise
            except FAILURES:
                # The error is reported when the engine is tried.
                continue
            quantizers[key] = quantizer
    return quantizers


def quantizer_of(config: RunConfig, calibrated: Calibrated) -> Quantizer:
    """Return the quantizer of the configuration that another process chose."""
    name, dtype, dynamic = key = (
        config.quantizer.backend,
        config.quantizer.dtype,
        config.quantizer.activations.ranges == "dynamic",
    )
    if key in calibrated:
        return calibrated[key]
    with alone():
        first, ranges = next(iter(calibrated.values())), "dynamic" if dynamic else None
        quantizer = first.for_backend(name, ranges=ranges, dtype=dtype)
        # Plan now, because this needs no other process.
        _ = quantizer.plan
    return quantizer


_FAR = 1.5
"""Slowdown for backends about which a rough plan says less."""

_FAR_BEHIND, _LONG_S = 2.0, 0.02
"""Slowdown from which a float engine is not compared with the model, and the seconds of a call from which a comparison
takes longer than the measurement.
"""

_ROUNDS, _DISTURBED_ROUNDS, _SECONDS, _WARMUP = 5, 20, 5.0, 1
"""Interleaved rounds of all engines at each size, further rounds if other work disturbs these, a time limit in seconds,
which reduces the rounds of slow ones, and rounds of warmup before.
"""


class RoughTrials:
    """Rough trials of backends, one for each.

    Args:
        borrow: returns the engine of a variant's backend from the file of the quantized engine with this name.
        make: returns the engine of a variant's backend from a rough plan.
        batches: the batches of a choice. A trial takes the first two, because a third one may be so large that calls
            take seconds.
        threads: number of CPU threads of the engines.
    """

    def __init__(
        self,
        borrow: Callable[[Variant, str], Engine],
        make: Callable[[Variant, Quantizer], Engine],
        batches: Sequence[Batch],
        threads: int = 1,
    ) -> None:
        self._borrow = borrow
        self._make = make
        self._threads = threads
        self._batches = batches[:2]
        self._slow: dict[str, str | None] = {}

    def too_slow(
        self, variant: Variant, calibrated: Quantizer, rivals: Mapping[str, Engine], planned: Collection[str]
    ) -> str | None:
        """Return why the backend of a variant is too slow to need a good plan; None if it may be the fastest."""
        name = variant.backend
        least = least_ratio(calibrated.config, name, planned)
        if not rivals or least is None:
            return None
        if name not in self._slow:
            # With dynamic ranges, an engine has other operations.
            static, other = replace(variant, dynamic=False), next((key for key in rivals if "dynamic" not in key), None)
            timed = partial(too_slow, variant.name, rivals=rivals, batches=self._batches, threads=self._threads)
            trials: list[tuple[str, Callable[[], Engine], float]] = []
            if other is not None:
                trials.append((f"the file of {other}", partial(self._borrow, static, other), SLOW * least / HOPELESS))
            trials.append(("max calibration", partial(self._make, static, calibrated), least))
            self._slow[name] = None
            for what, make, ratio in trials:
                # A failing backend is tried with a good plan, which reports the error.
                with suppress(*FAILURES):
                    self._slow[name] = self._slow[name] or timed(make(), least=ratio, what=what)
        return self._slow[name]


def least_ratio(config: QuantizerConfig, backend: str, planned: Collection[str]) -> float | None:
    """Return the slowdown from which a backend needs no good plan; None if a good plan takes no more time."""
    tried = profile(backend)
    settings = settings_of(config)
    known = replays_batches(settings) and any(profile(name).plan_traits == tried.plan_traits for name in planned)
    if known or not keeps_batches(settings):
        return None
    return HOPELESS if tried.site_kinds.isdisjoint({"matmul", "residual_add"}) else _FAR


def rough_quantizer(calibrated: Quantizer, backend: str) -> Quantizer:
    """Return a quantizer for a backend whose plan needs no runs of the model.

    It uses max calibration, no SmoothQuant, no bias correction, and rounding to nearest.
    """
    config = calibrated.config
    plain = {
        "activations": {**config.activations.model_dump(), "calibrator": "max", "smoothquant_alpha": None},
        "weights": {**config.weights.model_dump(), "rounding": "nearest"},
        "bias_correction": False,
    }
    rough = Quantizer(config, backend=backend, **plain)
    rough.inherit(calibrated)
    rough.clear_fallback()
    return rough


def rough_engine(
    calibrated: Quantizer,
    backend: str,
    model: nn.Module,
    example: Any,
    stem: Path,
    build: Callable[[Path, Path], Engine],
    opset: int | None = None,
    axes: DataSizes | None = None,
) -> Engine:
    """Return the engine of a backend from a rough plan."""
    rough, onnx = rough_quantizer(calibrated, backend), stem.with_name(f"{stem.name}.onnx")
    rough.export(rough.quantize(model), onnx, example, opset=opset, dynamic_axes=axes)
    return build(onnx, stem.with_name(f"{stem.name}.engine"))


def too_slow(
    name: str,
    engine: Engine,
    rivals: Mapping[str, Engine],
    batches: Sequence[Batch],
    least: float,
    what: str,
    threads: int = 1,
) -> str | None:
    """Return why an engine that was made with ``what`` cannot be the fastest; None if it may be."""
    latencies = [_seconds({**rivals, name: engine}, batch, _ROUNDS, threads) for batch in batches]
    best, ratio = _fastest_rival(name, latencies)
    return None if ratio < least else f"with {what} it takes {text.times(ratio)} the time of {best}"


def far_behind(name: str, engine: Engine, rivals: Mapping[str, Engine], batch: Batch, threads: int = 1) -> str | None:
    """Return why a float engine cannot be the fastest one, beside compared float engines of other backends; else None.

    A comparison of its outputs would take longer than this measurement.
    """
    latencies = _seconds({**rivals, name: engine}, batch, rounds=1, threads=threads)
    best, ratio = _fastest_rival(name, [latencies])
    if latencies[name] < _LONG_S or ratio < _FAR_BEHIND:
        return None
    return f"it takes {text.times(ratio)} the time of {best}"


def _seconds(engines: Mapping[str, Engine], batch: Batch, rounds: int, threads: int) -> dict[str, float]:
    """Return the interleaved latencies of engines with this number of threads on a batch in seconds.

    Beside other work, that is the time of ``clock_beside_others``.
    """
    calls = {name: partial(engine, engine_inputs(engine, batch)) for name, engine in engines.items()}
    samples = interleaved_latency(calls, rounds=rounds, warmup=_WARMUP, seconds=_SECONDS)
    if is_disturbed(samples):
        clock = clock_beside_others(min(map(min, samples.values())), threads)
        more = interleaved_latency(calls, rounds=_DISTURBED_ROUNDS, warmup=0, seconds=_SECONDS, clock=clock)
        samples = {name: [*values, *more[name]] for name, values in samples.items()}
    return shortest(samples)


def _fastest_rival(name: str, latencies: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """Return the fastest other engine, and the latency of an engine relative to it, over all sizes."""
    ratios = {key: geometric_mean(times[name] / times[key] for times in latencies) for key in latencies[0]}
    best = max(ratios.keys() - {name}, key=lambda key: ratios[key])
    return best, ratios[best]
