"""The choice of a conversion: all engines for this CPU are made, checked, scored and timed; the fastest is taken."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quantizer.common.progress import counted
from quantizer.engines import Engine, InputSizes, Inspection, inspect_engine
from quantizer.engines.candidates import Variant
from quantizer.errors import EngineError
from quantizer.quantizer import Quantizer
from quantizer.report import text
from quantizer.report.record import Candidate, EngineChoice
from quantizer.runs.choose_engine import (
    FAILURES,
    HOPELESS,
    NO_FASTER,
    bound,
    candidate_line,
    choose,
    failed,
    named,
    not_built,
    slow_ones,
    timed,
)
from quantizer.runs.convert.engine_maker import EngineMaker, Made
from quantizer.runs.convert.folder import ENGINE, ONNX
from quantizer.runs.convert.measure import ShapeLatency, measure_latency
from quantizer.runs.outputs.compare_outputs import far_from_float
from quantizer.runs.placement.rough_plan import RoughTrials
from quantizer.runs.run_context import engine_inputs
from quantizer.runs.scoring import Scoring
from quantizer.tasks import Batch

PYTORCH = "PyTorch float"


@dataclass(frozen=True)
class Chosen:
    """An engine that was chosen.

    Attributes:
        choice: what was tried.
        made: the engine.
        latency: its latency beside PyTorch's and that of the fastest engine in float of its backend, at each shape.
    """

    choice: EngineChoice
    made: Made
    latency: tuple[ShapeLatency, ...]


class Chooser:
    """Maker of all candidates of a conversion."""

    def __init__(self, maker: EngineMaker, scoring: Scoring, quantizer: Callable[[Variant], Quantizer]) -> None:
        self._maker = maker
        self._asked = maker.asked
        self._stage = maker.stage
        self._scoring = scoring
        self._quantizer = quantizer
        self._made: dict[str, Made] = {}
        self._records: dict[str, Candidate] = {}
        self._planned: set[str] = set()
        # A larger shape than the usual one may take long.
        self._trials = RoughTrials(maker.rough_engine, maker.timed_on[: maker.facts.usual + 1])

    def choose(self) -> Chosen:
        """Make the engines of all candidates, in float and quantized, and return the fastest that is right."""
        variants = self._asked.variants
        with (
            self._stage("choose the engine"),
            counted(variants, "candidates", unit="engine", note=named) as steps,
        ):
            for variant in steps:
                start = time.perf_counter()
                self._try(variant)
                names = [one.name for one in variants]
                line = candidate_line(self._records[variant.name], names, time.perf_counter() - start)
                self._stage.tell(line)
        latency = self._timed()
        choice = choose(list(self._records.values()), [str(shape) for shape in latency], self._asked.missing)
        choice = bound(choice, self._inspected)
        best = self._made[choice.candidates[0].name]
        return Chosen(choice, best, self._told(choice, latency, best))

    def _try(self, variant: Variant) -> None:
        """Make, check and score one candidate, and keep its record."""
        record = Candidate(backend=variant.backend, format=variant.format)
        try:
            if (hopeless := self._hopeless(variant)) is not None:
                self._drop(not_built(record, hopeless))
                return
            made = self._candidate(variant)
            score = partial(self._scoring.difference, variant.name, made.engine)
            difference = self._maker.kept.difference(made.built.path, score)
        except FAILURES as error:
            self._drop(failed(record, error))
        else:
            self._made[variant.name] = made
            far = far_from_float(made.checks)
            self._records[variant.name] = replace(record, sqnr_db=far, score_difference=difference)

    def deliver(self, made: Made, folder: Path) -> None:
        """Move an engine and its ONNX file into a folder of their own, which is made."""
        if made.quantized is None:
            folder.mkdir()
            self._maker.export_float(made.variant.backend, folder / ONNX)
        else:
            made.onnx.parent.rename(folder)
        if made.built.path.parent != made.onnx.parent or made.quantized is None:
            made.built.path.replace(folder / ENGINE)

    def _candidate(self, variant: Variant) -> Made:
        """Return one engine to choose from."""
        if variant.dtype is None:
            return self._maker.checked_plain_engine(variant)
        folder, first = self._folder(variant), self._first(variant)
        self._planned.add(variant.backend)
        if variant.dynamic:
            folder.mkdir()
            made = self._maker.as_calibrated(variant, self._quantizer(variant), folder)
        elif variant is first:
            folder.mkdir()
            made = self._maker.quantized(variant, self._quantizer(variant), folder, beside=self._quick)
        elif first.name in self._made:
            made = self._maker.rebuilt(variant, self._made[first.name], folder / ENGINE)
        else:
            raise EngineError(f"{first.name} failed, and it is built from the same file")
        allowed = self._asked.max_drop
        if made.budget and allowed is not None and made.budget[-1].drop > allowed:
            raise EngineError(f"its score drops by {made.budget[-1].drop:.5f}, and --max-drop allows {allowed:g}")
        return made

    def _hopeless(self, variant: Variant) -> str | None:
        """Return why a quantized engine cannot win; None: it may.

        One with ranges at run time has at most the speed of that with ranges from calibration (3% more were measured).
        A backend that is far slower with a rough plan gets no good one.
        """
        if (slow := self._too_slow(variant)) is not None:
            return slow
        static = self._made.get(self._first(variant).name) if variant.dynamic else None
        if static is not None and self._asked.max_drop is None:
            return NO_FASTER
        if static is None or static.engine is None or self._quick is None or static.engine is self._quick:
            return None
        ratio = self._maker.ratio(static.engine, self._quick)
        if ratio < HOPELESS:
            return None
        return f"{static.variant.name} takes {text.times(ratio)} the time of another, and this is no faster"

    def _too_slow(self, variant: Variant) -> str | None:
        """Return why a backend needs no plan; None: it needs one, or has it."""
        if variant.dtype is None or variant.backend in self._planned:
            return None
        rivals = {name: one.engine for name, one in self._made.items() if one.quantized is not None and one.engine}
        calibrated = self._quantizer(next(one for one in self._asked.variants if one.dtype is not None))
        return self._trials.too_slow(variant, calibrated, rivals, self._planned)

    def _first(self, variant: Variant) -> Variant:
        """Return the variant of a backend whose file and plan others of it go by."""
        return next(one for one in self._asked.variants if one.backend == variant.backend and one.dtype is not None)

    @property
    def _quick(self) -> Engine | None:
        """The first quantized engine: backends come with the one first that usually is the fastest."""
        return next((one.engine for one in self._made.values() if one.quantized is not None), None)

    def _drop(self, record: Candidate) -> None:
        """Take a candidate out of the choice; nothing of it stays."""
        self._made.pop(record.name, None)
        self._records[record.name] = record
        shutil.rmtree(self._maker.scratch / record.name.replace(" ", "-"), ignore_errors=True)

    def _folder(self, variant: Variant) -> Path:
        return self._maker.scratch / variant.file_name

    def _timed(self) -> tuple[ShapeLatency, ...]:
        """Time PyTorch and all engines at each shape; at the last and largest one none that is too slow to win."""
        taken: list[ShapeLatency] = []
        with self._stage("measure latency"):
            for place, batch in enumerate(self._maker.timed_on, start=1):
                last = place == len(self._maker.timed_on)
                left = slow_ones(list(self._records.values())) if last else set()
                engines = {name: one.engine for name, one in self._made.items() if name not in left and one.engine}
                if not engines:
                    break
                shape, broken = timed(engines, partial(self._latency, batch), partial(_called, batch))
                taken.append(shape)
                for name in engines.keys() - broken.keys():
                    times = (*self._records[name].milliseconds, shape.milliseconds[name])
                    self._records[name] = replace(self._records[name], milliseconds=times)
                for name, why in broken.items():
                    self._drop(failed(self._records[name], why))
                    self._stage.tell(f"{name} {self._records[name].verdict}")
        return tuple(taken)

    def _latency(self, batch: Batch, engines: dict[str, Engine]) -> ShapeLatency:
        return measure_latency({PYTORCH: self._maker.context.model, **engines}, batch, self._asked.threads)

    def _told(self, choice: EngineChoice, latency: Sequence[ShapeLatency], best: Made) -> tuple[ShapeLatency, ...]:
        """Return the latency of PyTorch, of the chosen backend's fastest engine in float, and of the chosen one."""
        names = {PYTORCH: PYTORCH}
        backend, every = best.variant.backend, len(latency)
        plain = [one for one in choice.candidates if one.is_float and one.backend == backend]
        plain = [one for one in plain if len(one.milliseconds) == every]
        if plain and best.variant.dtype is not None:
            names[plain[0].name] = plain[0].name
        names[choice.candidates[0].name] = "engine"
        return tuple(shape.named(names) for shape in latency)

    def _inspected(self, candidate: Candidate) -> Inspection:
        made, facts = self._made[candidate.name], self._maker.facts
        batch, sequence = facts.shapes[facts.usual]
        return inspect_engine(
            candidate.backend, made.built.path, threads=self._asked.threads, sizes=InputSizes(batch, sequence or batch)
        )


def _called(batch: Batch, engine: Engine) -> object:
    return engine(engine_inputs(engine, batch))
