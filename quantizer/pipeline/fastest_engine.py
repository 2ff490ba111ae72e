"""The choice between engines by their measured time: the fastest of those whose outputs are right.

The engines that a run chooses from, and the quantizers for them: of several processes all make them together.

A plan that is made in a moment, with which it is seen whether an engine can be the fastest before it has a good one.

How long an engine takes depends on what is quantized, and hardly on the ranges. A good plan takes most of the time of a
choice of engines, and is of no use for an engine that is far slower than another one. Products of two activations and
residual adds are quantized or not by what a good plan finds out, so that a rough one tells less of a backend that has
kernels for them. A backend whose plans are those of another one needs no trial: it has its good plan in a moment.
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
from quantizer.engines import Engine, Inspection, interleaved_latency, medians
from quantizer.engines.for_this_cpu import Variant, cpu_candidates, cpu_variants
from quantizer.errors import EngineError, LostRankError, QuantizerError
from quantizer.pipeline.context import engine_inputs
from quantizer.plan.targets import profile
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine, text
from quantizer.report.record import Candidate, EngineChoice
from quantizer.settings import settings_of
from quantizer.tasks import Batch
from quantizer.utils.cpu import cpu_flags, saturates
from quantizer.utils.distributed import alone, get_world_size
from quantizer.utils.sizes import DataSizes

FAILURES = (QuantizerError, RuntimeError)
"""What takes a candidate out of the choice and leaves the others in it; libraries raise the second."""

HOPELESS = 1.2
"""A quantized engine that is so many times as slow as another one is not improved: groups that fall back to float,
ranges at run time, or better ones than a rough plan has, have gained a few percent."""

NO_FASTER = "no faster than int8"
"""Why an engine with ranges at run time is not built.

It loses less accuracy, which counts under a budget; its speed is at most 3% more than that of the other one.
"""

SLOW = 1.5
"""A candidate that takes so many times as long as another one of its kind is not timed at further shapes."""

_TIE = 1.03
"""Of engines in one format whose times differ by less, noise would choose: the first that was tried comes first."""

_INT8_FLAGS = frozenset({"avx2", "amx_int8", "asimddp", "i8mm"})

Times = TypeVar("Times")
Timed = TypeVar("Timed")


def choose(candidates: Sequence[Candidate], shapes: Sequence[str], missing: Sequence[str]) -> EngineChoice:
    """Return the choice of the candidate with the least time, in the geometric mean of its ratios over all shapes.

    Of several in one format that are about as fast, it is the first, so that another run chooses the same.

    Args:
        candidates: what was tried, in that order; those that failed have no times, and say why in ``verdict``. Those
            that were too slow at the first shapes have the times of these.
        shapes: the names of the shapes.
        missing: what is not installed.
    """
    ran = sorted((one for one in candidates if len(one.milliseconds) == len(shapes) > 0), key=_time)
    slow = [one for one in candidates if 0 < len(one.milliseconds) < len(shapes)]
    failures = [one for one in candidates if not one.milliseconds]
    if not ran:
        reasons = "; ".join(f"{one.name}: {one.verdict}" for one in failures)
        raise EngineError(f"no engine is right and runs here: {reasons}")
    ran = _without_noise(ran, list(candidates).index)
    best = ran[0]
    slower = [replace(one, verdict=f"{text.times(one.times_of(best))} the time") for one in ran[1:]]
    for one in sorted(slow, key=lambda one: one.times_of(best)):
        where = " and ".join(shapes[: len(one.milliseconds)])
        slower.append(replace(one, verdict=f"{text.times(one.times_of(best))} the time at {where}: too slow to go on"))
    return EngineChoice(
        headline=_headline(ran),
        instructions=str(collect_machine()["instructions"] or "") or None,
        shapes=tuple(shapes),
        candidates=(replace(best, verdict="chosen"), *slower, *failures),
        missing=tuple(missing),
    )


def _without_noise(ran: list[Candidate], tried: Callable[[Candidate], int]) -> list[Candidate]:
    """Return candidates, the fastest first; of the fastest of a kind that are tied, the first that was tried."""
    order = list(ran)
    for is_float in (True, False):
        best = next((one for one in ran if one.is_float is is_float), None)
        if best is not None:
            start = order.index(best)
            tied = takewhile(partial(_is_tied, best), order[start:])
            order.insert(start, order.pop(order.index(min(tied, key=tried))))
    return order


def _is_tied(best: Candidate, other: Candidate) -> bool:
    return other.format == best.format and other.times_of(best) < _TIE


def slow_ones(candidates: Sequence[Candidate]) -> set[str]:
    """Return the names of those that cannot become the fastest of their kind, in float or quantized, at more shapes."""
    slow = set()
    for is_float in (True, False):
        kind = [one for one in candidates if one.is_float is is_float and one.milliseconds]
        best = min(kind, key=_time, default=None)
        slow |= {one.name for one in kind if best is not None and one.times_of(best) >= SLOW}
    return slow


def timed(
    engines: dict[str, Timed], time: Callable[[dict[str, Timed]], Times], call: Callable[[Timed], object]
) -> tuple[Times, dict[str, str]]:
    """Return the times of the engines that run, and why the others do not, by name."""
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
    """Return the quantized candidates that ran, in their order in the choice."""
    low = [one for one in choice.candidates if not one.is_float]
    ran = [one for one in low if one.milliseconds]
    if not ran:
        reasons = "; ".join(f"{one.name}: {one.verdict}" for one in low)
        raise EngineError(f"no quantized engine is right and runs here: {reasons}")
    return ran


def require_sites(quantizer: Quantizer) -> None:
    """Raise if a plan quantizes nothing, as where no site fits the kernels with ranges at run time."""
    if not quantizer.coverage.share:
        raise EngineError("no product of this model can be quantized in this way, and all would be computed in float")


def candidate_line(candidate: Candidate, names: Sequence[str], seconds: float) -> str:
    """Return a candidate in a line once it was tried, before it is timed: its outputs and score against float.

    Args:
        candidate: the candidate; one that failed has the reason in its verdict.
        names: the names of all candidates, for columns that stand below each other.
        seconds: how long it took to make it, and to check and score it.
    """
    name = candidate.name.ljust(max(map(len, names)))
    if candidate.verdict:
        return f"{name}  {candidate.verdict}"
    near = "equal to float" if candidate.sqnr_db is None else f"{text.decibels(candidate.sqnr_db):>5} dB"
    scored = "" if candidate.score_difference is None else f"  {text.signed(candidate.score_difference):>7}"
    return f"{name}  {near}{scored}  {seconds:5.1f} s"


def named(variant: Variant) -> str:
    """Return the note on a candidate that is being made, for the line of progress."""
    return f"now {variant.name}"


def not_built(candidate: Candidate, why: str) -> Candidate:
    """Return the record of a candidate that cannot win."""
    return replace(candidate, milliseconds=(), verdict=f"not built: {why}")


def failed(candidate: Candidate, why: object) -> Candidate:
    """Return the record of a candidate that is out of the choice."""
    return replace(candidate, milliseconds=(), verdict=f"failed: {why}")


def _time(candidate: Candidate) -> float:
    """Return the geometric mean of the times, with which the mean of ratios does not depend on what they refer to."""
    return math.exp(sum(map(math.log, candidate.milliseconds)) / len(candidate.milliseconds))


def _headline(ran: Sequence[Candidate]) -> str:
    """Return the first of them, the fastest, and the fastest in float; the speed-up is measured later, in the end."""
    best = ran[0]
    floats = [candidate for candidate in ran if candidate.is_float]
    quantized = [candidate for candidate in ran if not candidate.is_float]
    if best.is_float and quantized:
        lost = text.times(quantized[0].times_of(best))
        return (
            f"nothing in INT8 is faster than float here, and {best.name} is delivered: {quantized[0].name} takes "
            f"{lost} its time in the choice"
        )
    said = f"{best.name} is {'the fastest' if all(one.times_of(best) >= 1 for one in ran) else 'as fast as any'}"
    return said if best.is_float or not floats else f"{said}; in float it is {floats[0].name}"


def bound(choice: EngineChoice, inspect: Callable[[Candidate], Inspection]) -> EngineChoice:
    """Return the choice; where float won over INT8, with what bounds the fastest engine in INT8 in its first line."""
    best, *others = choice.candidates
    lost = [one for one in others if not one.is_float and len(one.milliseconds) == len(choice.shapes)]
    if not best.is_float or not lost:
        return choice
    try:
        shares = inspect(lost[0]).shares
    except FAILURES:
        shares = ()
    told = {share.precision: share.time_share for share in shares if share.time_share is not None}
    said = [f"{text.percent(share)} in {precision}" for precision, share in told.items()]
    why = f"This CPU ({choice.instructions or 'of unknown instructions'}){_what_it_lacks()}"
    why = f"{why}; the time of {lost[0].name} is spent {', '.join(said)}" if said else why
    return replace(choice, headline=f"{choice.headline}. {why}")


def _what_it_lacks() -> str:
    """Return what an x86 CPU without VNNI does instead, or that a CPU has nothing for INT8; empty: not known."""
    flags = cpu_flags()
    if saturates():
        return " has no VNNI, and multiplies bytes in several steps"
    if any("vnni" in flag for flag in flags):
        return " has VNNI"
    return " has no instructions for INT8: neither AVX2 nor VNNI" if flags and flags.isdisjoint(_INT8_FLAGS) else ""


Calibrated: TypeAlias = dict[tuple[str, bool], Quantizer]
"""Quantizers of one calibration, by backend and by whether ranges are taken at run time; the calibrated one first."""


def variants_of(config: RunConfig, among: Sequence[str]) -> Sequence[Variant]:
    """Return the engines to choose from; without names in ``among`` those for this CPU."""
    wanted = config.quantizer
    return cpu_variants(
        cpu_candidates(among)[0],
        dtype=wanted.dtype if config.quantize else None,
        precision=config.engine.inference_precision,
        # A plan that is to be trained keeps the ranges that training moves.
        dynamic="ranges" not in wanted.activations.model_fields_set and config.qat is None,
        compiled=config.engine.compiled,
        named=bool(among),
    )


def for_all_variants(config: RunConfig, calibrated: Quantizer, among: Sequence[str]) -> Calibrated:
    """Return the quantizers of several processes for the backends to choose from, as far as they need batches.

    All processes choose their ranges together. One process makes each when it comes to its engine.
    """
    found = {(calibrated.config.backend, False): calibrated}
    for variant in variants_of(config, among) if get_world_size() > 1 else ():
        if variant.dtype is not None and (variant.backend, False) not in found:
            try:
                quantizer = calibrated.for_backend(variant.backend)
                _ = quantizer.plan
            except LostRankError:
                raise
            except FAILURES:
                # What cannot be made is told where its engine is tried.
                continue
            found[variant.backend, False] = quantizer
    return found


def quantizer_of(config: RunConfig, calibrated: Calibrated) -> Quantizer:
    """Return the quantizer with which a run goes on whose configuration another process chose."""
    name, dynamic = config.quantizer.backend, config.quantizer.activations.ranges == "dynamic"
    if (name, dynamic) in calibrated:
        return calibrated[name, dynamic]
    with alone():
        quantizer = next(iter(calibrated.values())).for_backend(name, ranges="dynamic" if dynamic else None)
        # Decided here, where no other process needs to come.
        _ = quantizer.plan
    return quantizer


_FAR = 1.5
"""The least ratio for a backend of which a rough plan tells less."""

_ROUNDS, _SECONDS = 15, 10.0
"""Of all engines interleaved, at each shape; slow ones have fewer rounds."""


class RoughTrials:
    """Trials of the backends of a choice with rough plans, one for each."""

    def __init__(self, make: Callable[[Variant, Quantizer], Engine], batches: Sequence[Batch]) -> None:
        self._make = make
        self._batches = batches
        self._slow: dict[str, str | None] = {}

    def too_slow(
        self, variant: Variant, calibrated: Quantizer, rivals: Mapping[str, Engine], planned: Collection[str]
    ) -> str | None:
        """Return why the backend of a variant needs no plan; None: it may have the fastest engine."""
        name = variant.backend
        least = least_ratio(calibrated.config, name, planned)
        if not rivals or least is None:
            return None
        if name not in self._slow:
            self._slow[name] = None
            # What fails here is tried with a good plan, whose error is told.
            with suppress(*FAILURES):
                engine = self._make(replace(variant, dynamic=False), calibrated)
                self._slow[name] = too_slow(variant.name, engine, rivals, self._batches, least)
        return self._slow[name]


def least_ratio(config: QuantizerConfig, backend: str, planned: Collection[str]) -> float | None:
    """Return how many times as slow as another one an engine of a rough plan has to be to need no good plan.

    None: a good plan is made in no more time.
    """
    tried = profile(backend)
    settings = settings_of(config)
    known = replays_batches(settings) and any(profile(name).plan_traits == tried.plan_traits for name in planned)
    if known or not keeps_batches(settings):
        return None
    return HOPELESS if tried.site_kinds.isdisjoint({"matmul", "residual_add"}) else _FAR


def rough_quantizer(calibrated: Quantizer, backend: str) -> Quantizer:
    """Return a quantizer for a backend, from a calibration, whose plan takes no runs of the model.

    Ranges are the largest values seen; channels have no factors, biases are not corrected, weights are rounded to the
    nearest codes.
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
    name: str, engine: Engine, rivals: Mapping[str, Engine], batches: Sequence[Batch], least: float
) -> str | None:
    """Return why an engine, built from a rough plan, cannot be the fastest; None: it may be."""
    engines, taken = {**rivals, name: engine}, []
    for batch in batches:
        calls = {key: partial(one, engine_inputs(one, batch)) for key, one in engines.items()}
        taken.append(medians(interleaved_latency(calls, rounds=_ROUNDS, seconds=_SECONDS)))
    ratios = {key: geometric_mean(times[name] / times[key] for times in taken) for key in rivals}
    best = max(rivals, key=lambda key: ratios[key])
    if ratios[best] < least:
        return None
    return f"with ranges by largest values it takes {text.times(ratios[best])} the time of {best}"
