"""The stages of a job, from the model and its data to the report, in their order.

Each stage is a function of the ``Job``, and the names of the lines that it prints, which are told before it starts.
Several processes go through the first ones together: each has its part of the batches and of the scored samples.
The later ones need the machine to themselves, and the first process carries them out alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.config import AmpConfig, RunConfig, dump_yaml
from quantizer.errors import EngineError
from quantizer.pipeline.benchmark import build_options, measure_latency, measure_memory
from quantizer.pipeline.choose_engine import Picked, pick_backend
from quantizer.pipeline.compare_outputs import (
    NOTHING_DB,
    OutputCheck,
    References,
    Tolerance,
    WrongEngineError,
    output_distances,
    refusal,
    right_engine,
)
from quantizer.pipeline.context import Runs
from quantizer.pipeline.deliver import deliver
from quantizer.pipeline.fastest_engine import for_all_variants, quantizer_of
from quantizer.pipeline.faults import require_tools
from quantizer.pipeline.job import QUANTIZER, Job, Outline
from quantizer.pipeline.latency_fallback import RunPlacement
from quantizer.pipeline.make_record import record_of, write_reports
from quantizer.pipeline.model_graphs import QUANTIZED_STEM
from quantizer.pipeline.open_axes import settle_axes
from quantizer.pipeline.processes import from_first_rank, require_same_work
from quantizer.pipeline.run_engines import RunEngines, nearest_form
from quantizer.pipeline.search_max_drop import (
    CHECK_BY_FUNCTION,
    CHECK_ON_SAMPLES,
    DIAGNOSE,
    measure_sensitivity,
    search_fallback,
    wants_diagnosis,
    with_diagnosis,
)
from quantizer.pipeline.train import train
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord
from quantizer.report.record import OutputDistance
from quantizer.tasks import Batch
from quantizer.utils.batches import in_several
from quantizer.utils.distributed import alone, get_rank, get_world_size
from quantizer.utils.registry import named_in_errors

Value = TypeVar("Value")


def carry_out(job: Job) -> RunRecord | None:
    """Carry out all stages of a job; return its record, or None in a process that is not the first one."""
    for stage in TOGETHER:
        if stage.wanted(job.config):
            with stage.named():
                stage.run(job)
    if get_rank() != 0:
        return None
    with alone():
        for stage in ALONE:
            if stage.wanted(job.config):
                with stage.named():
                    stage.run(job)
        return report(job)


def load(job: Job) -> None:
    """Load the model and its data, and check all that would otherwise fail after minutes of calibration."""
    with job.timer("load model and data"):
        job.work = job.load(job.timer, job.kept, job.target)
        job.fixed = settle_axes(job.context, job.graphs, job.config.export.opset, job.target)
    job.config = config = job.work.fit(job.config)
    settings = dump_yaml(config)
    (job.target / "config.yaml").write_text(settings, encoding="utf-8")
    examples = job.examples
    # Those of the calibration are compared when they are dealt out.
    dealt = {
        "evaluation": examples.evaluation,
        "tuning": examples.tuning,
        "training": examples.training,
        "check": examples.check,
    }
    require_same_work(settings, job.model, {**dealt, "head": examples.head})
    job.engines = RunEngines(job.context, config, job.target, job.graphs)
    max_drop = None if config.fallback is None else config.fallback.max_drop
    job.budget = job.work.budget(max_drop, checked=config.qat is None and job.engines.runs_here)
    job.budget.warn("fallback.max_drop")
    job.latency_fallback = RunPlacement(job.context, config, job.target, job.graphs)
    require_tools({config.quantizer.backend: build_options(config)}, html="html" in config.report.formats)
    job.work.check()
    if config.quantize:
        job.quantizer = Quantizer(config.quantizer)
        if config.quantizer.formats:
            # Raises if a rule matches nothing, which would otherwise happen when the plan is made.
            job.quantizer.inspect(job.model)


def calibrate(job: Job) -> None:
    """Calibrate, after fitting the head if the task has one."""
    job.work.fit_head()
    if not job.config.quantize:
        return
    job.batches = job.graphs.calibration(in_several(job.context.feed.batches, job.examples.calibration))
    with job.timer("calibrate"):
        job.work.calibrate(job.quantizer, job.batches)
        if get_world_size() > 1:
            # Here all choose ranges and codes together; one process does when it first needs the plan.
            _ = job.quantizer.plan


def choose_engine(job: Job) -> None:
    """Go on with the fastest engine that is right, its configuration and its quantizer."""
    if (among := job.among) is None:
        return
    calibrated = for_all_variants(job.config, job.quantizer, among) if job.config.quantize else {}
    picked: list[Picked] = []

    def choose() -> dict[str, Any]:
        work, samples = job.work, job.samples
        made = pick_backend(work, job.config, calibrated, samples, job.target, among, fastest=job.converts)
        picked.append(made)
        return picked[0].config.model_dump(mode="json")

    told = from_first_rank(choose, Any)
    if picked:
        job.config, job.choice, job.engines = picked[0].config, picked[0].choice, picked[0].engines
        if picked[0].quantizer is not None:
            job.quantizer = picked[0].quantizer
    else:
        job.config = RunConfig.model_validate(told)
        if job.config.quantize:
            job.quantizer = quantizer_of(job.config, calibrated)
    (job.target / "config.yaml").write_text(dump_yaml(job.config), encoding="utf-8")


def time_groups(job: Job) -> None:
    """Measure what each group is worth in time, and keep those in float that low precision makes slower."""
    latency_costs = from_first_rank(
        partial(job.latency_fallback.measured, job.quantizer, job.engines), LatencyCosts | None
    )
    job.latency_fallback.latency_costs = latency_costs
    if latency_costs is not None and latency_costs.slower():
        job.quantizer.fallback(None, latency_costs=latency_costs)


def fall_back(job: Job) -> None:
    """Measure sensitivity, and let the groups fall back to float that are asked for."""
    asked, amp = job.config.fallback, job.config.amp or AmpConfig()
    if job.config.amp is None and asked is None:
        return
    by_metric = amp.measure == "metric"

    def measured(mine: Quantizer) -> nn.Module:
        proxy = mine.amp(
            job.model,
            measure=amp.measure,
            granularity=amp.granularity,
            metric=job.metric if by_metric else None,
            higher_is_better=not by_metric or job.metric.higher_is_better,
        )
        if job.config.amp is not None:
            measure_sensitivity(job.context, mine, proxy, [] if by_metric else job.batches[: amp.batches])
        return proxy

    # A score is taken on tuning samples, which the budgets of runs share out differently.
    job.proxy = measured(job.quantizer) if by_metric else job.work.amp(job.quantizer, str(job.config.amp), measured)
    if asked is not None and asked.max_drop is None:
        how = asked.model_dump(include={"num", "ratio", "names", "min_speedup", "costs"})
        job.quantizer.fallback(job.proxy, latency_costs=job.latency_fallback.latency_costs, **how)
    elif asked is not None and asked.max_drop is not None:
        _search(job, asked.max_drop)


def _search(job: Job, max_drop: float) -> None:
    asked = job.config.fallback
    assert asked is not None
    assert job.proxy is not None
    most, costs, latency_costs = asked.evaluations, asked.costs, job.latency_fallback.latency_costs
    search_fallback(
        job.context,
        job.quantizer,
        job.proxy,
        job.metric,
        max_drop,
        max_evaluations=most,
        costs=costs,
        latency_costs=latency_costs,
    )


def build(job: Job) -> None:
    """Quantize, train if asked, build and compare; search again until the engine meets its budget and its speed."""
    while True:
        if job.config.quantize:
            _quantize(job)
        max_drop = from_first_rank(partial(_drop_of_engine, job), float | None)
        if max_drop is not None:
            _search(job, max_drop)
        elif not job.config.quantize or job.latency_fallback.is_fast_enough(job.quantizer, job.proxy, job.engines):
            return


def _quantize(job: Job) -> None:
    """Make the frozen model, with training also that of PTQ before it."""
    job.forms, job.training = {}, None
    if job.config.qat is not None:
        job.forms["ptq"] = job.quantizer.quantize(job.model)
        # Of the float model that training changes.
        job.context.exported.clear()
        job.training = train(job.context, job.config.qat, job.quantizer, job.examples.training, job.metric)
    with job.timer("quantize"):
        job.forms["proxy" if job.training is None else "qat"] = job.quantizer.quantize(job.model)


def _drop_of_engine(job: Job) -> float | None:
    """Build the engines, and return what the next search may drop; None if the engine meets the budget."""
    if not job.config.quantize:
        job.built = job.engines.build_float()
        compare(job)
        return None
    job.built = job.engines.build(job.quantizer, job.frozen, trained=job.training is not None)
    compare(job)
    chosen, engine = job.quantizer.chosen_fallback, job.engines.load().get("engine")
    return _scored(job, lambda: job.budget.next_drop(engine, 0 if chosen is None else len(chosen.groups)), None)


def compare(job: Job) -> None:
    """Compare the engine's outputs with those of the proxy and the float model, at several sizes.

    A model for all sizes that is wrong is replaced by such for fixed sizes. An engine that is wrong is refused.
    """
    if job.built["engine"] is job.compared:
        return
    feed, job.checks, job.only_sizes, job.distances = job.context.feed, {}, (), ()
    job.alone.pop("engine", None)
    job.refused.pop("engine", None)
    with job.timer("compare the outputs"):
        batches = job.graphs.checked_on(job.config, job.samples)
        job.references = {name: References(some, apart=feed.samples_independent) for name, some in batches.items()}
        try:
            if job.engines.runs_here:
                job.checks = _right(job, "engine", job.frozen, job.tolerance(quantized=job.config.quantize))
            else:
                job.distances = tuple(_of_proxy(job, batches))
        except WrongEngineError as wrong:
            job.checks = {QUANTIZED_STEM: tuple(wrong.checks)}
            _refuse(job, str(wrong))
        except EngineError as error:
            # What was measured until here is not thrown away for it; the verdict says that nothing was compared.
            job.timer.say(f"warning: {error}")
    job.built = job.engines.built
    job.compared = job.built["engine"]


def _of_proxy(job: Job, batches: Mapping[str, Sequence[Batch]]) -> Iterator[OutputDistance]:
    """Yield how far the outputs of the frozen model are from the float model's, where no engine runs."""
    floats, frozen = job.graphs.modules(job.model), job.graphs.modules(job.frozen)
    for name in job.graphs.names:
        some = batches[name][:1] if job.graphs.several else batches[name]
        for one in output_distances(floats[name], frozen[name], None, some, apart=job.context.feed.samples_independent):
            yield replace(one, output=_named(job, name, one.output))


def _named(job: Job, graph: str, output: str) -> str:
    return f"{graph}: {output}" if job.graphs.several else output


def score_models(job: Job) -> None:
    """Score the float model and the frozen ones."""
    job.scorer.take({name: job.graphs.runnable(form) for name, form in {"float": job.model, **job.forms}.items()})


def inspect(job: Job) -> None:
    """Save the quantizer, and look at the precisions of the engine's layers, before the time for its score is spent."""
    if job.config.quantize:
        job.quantizer.save(job.target / QUANTIZER)
    with job.timer("inspect the engine"):
        job.inspection = job.engines.inspect()


def score_engine(job: Job) -> None:
    """Score the engine, or a simulation of its types where it does not run here."""
    loaded = job.engines.load()
    near = nearest_form(loaded, job.quantizer, job.model) if job.config.quantize else loaded
    forms: dict[str, Runs] = {name: job.graphs.runnable(form) for name, form in job.forms.items()}
    near = {name: job.graphs.runnable(one) if isinstance(one, nn.Module) else one for name, one in near.items()}
    plain = job.scorer.scores(forms)
    job.scores = _scored(job, lambda: job.scorer.scores({**forms, **near}), plain) if near else plain
    if job.graphs.several:
        with job.timer("compare what is written"):
            job.agreement = job.graphs.agreement(job.samples, {**forms, **near})


def compare_float(job: Job) -> None:
    """Compare the float engine's worst output at any size with the float model's."""
    if not job.engines.runs_here:
        return
    with job.timer("compare the float engine"):
        try:
            checks = _right(job, "float", job.model, job.tolerance(quantized=False))
        except WrongEngineError as wrong:
            job.refused["float"] = str(wrong)
            job.float_engine_db = wrong.decibels
            return
        except EngineError as error:
            job.timer.say(f"warning: the float engine: {error}")
            job.float_engine_db = NOTHING_DB
            return
    decibels = [one.sqnr_db for of_graph in checks.values() for one in of_graph]
    job.float_engine_db = min((one for one in decibels if one is not None), default=None)


def _right(job: Job, name: str, model: nn.Module, bound: Tolerance) -> dict[str, tuple[OutputCheck, ...]]:
    """Return the checks of an engine that is right, as it is or, from now on, for fixed sizes, by graph."""
    graphs, found = job.graphs, {}
    modules, floats = graphs.checked_modules(model), graphs.checked_modules(job.model)
    for graph, engine in graphs.checked_as(job.engines.graphs_of(name)).items():
        rebuild = None if graphs.several else partial(job.engines.build_for, name)
        references, pair = job.references[graph], (modules[graph], floats[graph])
        try:
            right = right_engine(engine, job.built[name], references, pair, bound, rebuild)
        except WrongEngineError as wrong:
            if not graphs.several:
                raise
            raise WrongEngineError(
                f"{graph}: {wrong}", f"{graph}: {wrong.found}", wrong.decibels, wrong.checks
            ) from wrong
        found[graph] = tuple(replace(one, output=_named(job, graph, one.output)) for one in right.checks)
        if name == "engine":
            job.only_sizes = right.only_sizes
        if right.note is not None:
            job.alone[name] = f"the {'engine' if name == 'engine' else 'float engine'} takes {right.note}"
            job.timer.say(f"warning: {job.alone[name]}")
    job.built = job.engines.built
    return found


def _refuse(job: Job, why: str) -> None:
    job.refused["engine"] = why
    job.engines.refuse()
    job.timer.say(f"warning: {refusal(why)}")


def _scored(job: Job, take: Callable[[], Value], otherwise: Value) -> Value:
    """Return what scores an engine; where that needs a size that it does not take alone, it is refused."""
    try:
        return take()
    except EngineError as error:
        if "engine" not in job.alone:
            raise
        _refuse(job, f"{job.alone.pop('engine')}, and its score needs others: {error}")
        return otherwise


def benchmark(job: Job) -> None:
    """Time the engines, interleaved, and measure their memory; the float engine of a refused one nobody runs alone."""
    loaded = {} if "engine" in job.refused else job.engines.load()
    if not loaded:
        return
    single = {name: job.engines.graphs_of(name) for name in loaded}
    context, config, name = job.context, job.config, job.engines.float_name
    if job.alone:
        # An engine for some sizes alone has the usual one.
        config = config.model_copy(update={"report": config.report.model_copy(update={"latency_shapes": "usual"})})
    job.latencies = measure_latency(context, config, job.graphs, loaded, single, name, job.samples)
    # Both engines are needed for a ratio.
    if config.quantize and not job.graphs.several:
        job.memory = measure_memory(context, config, job.built)


def report(job: Job) -> RunRecord:
    """Write what was asked for beside the engine, and the reports; return the record."""
    record = record_of(job)
    for name in job.refused:
        for file in job.engines.files_of(name):
            file.unlink()
    if job.config.quantize and job.work.diagnoses:
        record = with_diagnosis(record, job.context, job.config, job.quantizer, job.batches)
    record = replace(record, stages=job.stages)
    snippet = deliver(job, record)
    write_reports(record, job.config.report.formats, job.target, snippet)
    job.work.write_call(job.target)
    return record


@dataclass(frozen=True)
class Stage:
    """One step of a job.

    Attributes:
        run: carries it out.
        names: yields the names of the lines that it prints, in order.
        of_quantized: whether it is left out where nothing is quantized.
    """

    run: Callable[[Job], None]
    names: Callable[[Outline], Iterator[str]]
    of_quantized: bool = False

    def wanted(self, config: RunConfig) -> bool:
        """Return whether a configuration asks for it."""
        return config.quantize or not self.of_quantized

    def named(self) -> AbstractContextManager[None]:
        """Return a context in which errors say that they came in this stage."""
        return named_in_errors(f"stage {self.run.__name__}")


def _loads(of: Outline) -> Iterator[str]:
    yield "load model and data"
    if of.by_function and of.scored:
        yield "score the float"


def _calibrates(of: Outline) -> Iterator[str]:
    if of.config.data.head is not None:
        yield "fit the head on float embeddings"
    if of.config.quantize:
        yield from (*(("write what calibrates",) if of.writes else ()), "calibrate")


def _chooses(of: Outline) -> Iterator[str]:
    if of.chooses:
        yield "choose the engine"


def _times_groups(of: Outline) -> Iterator[str]:
    if of.here and not of.writes:
        yield from ("quantize", *(() if of.chooses else ("export", "build the engines")), "time the groups")


def _falls_back(of: Outline) -> Iterator[str]:
    if of.config.amp is not None:
        yield "measure sensitivity"
    if of.searches:
        yield "search fallback groups"


def _builds(of: Outline) -> Iterator[str]:
    if of.config.qat is not None:
        yield "train with rounded operands"
    if of.config.quantize:
        yield "quantize"
    if of.changed or not of.here or ((of.writes or not of.config.quantize) and not of.chooses):
        yield from ("export", "build the engines")
    yield "compare the outputs"
    if of.searches and of.here and of.config.qat is None:
        yield CHECK_BY_FUNCTION if of.by_function else CHECK_ON_SAMPLES
    if of.config.fallback is not None and of.config.fallback.min_speedup is not None and of.here:
        yield "time the engine against its goal"


def _scores_models(of: Outline) -> Iterator[str]:
    if of.scored:
        forms = ["proxy"] if of.config.qat is None else ["ptq", "qat"]
        floats = () if of.chooses or of.by_function else ("float",)
        yield from (f"score the {form}" for form in (*floats, *(forms if of.config.quantize else ())))


def _inspects(_: Outline) -> Iterator[str]:
    yield "inspect the engine"


def _scores_engine(of: Outline) -> Iterator[str]:
    if of.scored and of.here and (of.changed or not of.chooses):
        yield "score the engine"
    if of.writes:
        yield "compare what is written"


def _compares_float(of: Outline) -> Iterator[str]:
    if of.here:
        yield "compare the float engine"


def _benchmarks(of: Outline) -> Iterator[str]:
    if of.here:
        yield "measure latency"
    if of.here and of.writes:
        yield "measure the parts"
    if of.here and of.config.quantize and not of.writes:
        yield "measure memory"


def _reports(of: Outline) -> Iterator[str]:
    if wants_diagnosis(of.config):
        yield DIAGNOSE


TOGETHER = (
    Stage(load, _loads),
    Stage(calibrate, _calibrates),
    Stage(choose_engine, _chooses),
    Stage(time_groups, _times_groups, of_quantized=True),
    Stage(fall_back, _falls_back, of_quantized=True),
    Stage(build, _builds),
    Stage(score_models, _scores_models),
)
"""The stages that all processes carry out."""

ALONE = (
    Stage(inspect, _inspects),
    Stage(score_engine, _scores_engine),
    Stage(compare_float, _compares_float, of_quantized=True),
    Stage(benchmark, _benchmarks),
)
"""Those of the first process; the report comes last."""


def stage_names(of: Outline) -> Iterator[str]:
    """Yield the names of all lines that a job prints, in order."""
    for stage in (*TOGETHER, *ALONE):
        if stage.wanted(of.config):
            with named_in_errors(f"the names of stage {stage.run.__name__}"):
                yield from stage.names(of)
    yield from _reports(of)
