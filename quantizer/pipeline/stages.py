"""The stages of a job, from loading the model to the report, in order.

A stage is a function of the ``Job`` with the names of the lines that it prints, which are known before it starts. The
stages in ``TOGETHER`` run in all processes, each with its share of the batches and samples. The stages in ``ALONE``
need the machine to themselves and run in the first process only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from quantizer.algorithms.sensitivity.latency_costs import LatencyCosts
from quantizer.config import AmpConfig, RunConfig, dump_yaml
from quantizer.engines.measure import end_trial_process, trial_process
from quantizer.errors import EngineError
from quantizer.pipeline.benchmark import build_options, deployed, measure_latency, measure_memory
from quantizer.pipeline.check_rules import check_rules
from quantizer.pipeline.choose_engine import PickedBackend, pick_backend
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
from quantizer.pipeline.context import Runnable
from quantizer.pipeline.deliver import deliver
from quantizer.pipeline.diagnose_run import DIAGNOSE, wants_diagnosis, with_diagnosis
from quantizer.pipeline.fastest_engine import candidates_of, for_all_variants, quantizer_of
from quantizer.pipeline.job import QUANTIZER, Job, Outline
from quantizer.pipeline.latency_fallback import RunLatencyFallback
from quantizer.pipeline.layouts import check_layouts, write_layout_cards
from quantizer.pipeline.make_record import record_of, write_reports
from quantizer.pipeline.model_graphs import QUANTIZED_STEM
from quantizer.pipeline.open_axes import settle_axes
from quantizer.pipeline.preflight_checks import require_tools
from quantizer.pipeline.processes import from_first_rank, require_same_work
from quantizer.pipeline.run_engines import RunEngines, nearest_form
from quantizer.pipeline.scores import scores_forms
from quantizer.pipeline.search_max_drop import (
    CHECK_BY_FUNCTION,
    CHECK_ON_ROWS,
    measure_sensitivity,
    more_groups,
    search_fallback,
)
from quantizer.pipeline.train import train
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord
from quantizer.report.model_card import write_run_card
from quantizer.report.record import OutputDistance
from quantizer.tasks import Batch
from quantizer.utils.batches import in_several
from quantizer.utils.cpu import usable_cores
from quantizer.utils.distributed import alone, get_rank, get_world_size
from quantizer.utils.registry import named_in_errors

Value = TypeVar("Value")


def carry_out(job: Job) -> RunRecord | None:
    """Run all stages of a job, and return its record; None in all processes but the first."""
    # The process for trial builds imports its libraries while the model is loaded and calibrated.
    chooses = job.among is not None and get_rank() == 0
    trials = trial_process(candidates_of(job.config, job.among or ())[0]) if chooses else nullcontext()
    with trials, _one_core_left() if job.among is not None else nullcontext():
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


@contextmanager
def _one_core_left() -> Iterator[None]:
    """Leave one core to the process for trial builds and to neighbors, unless the user set fewer threads of torch.

    At each operation, the threads of torch wait for the slowest one. With two threads on two cores and one busy
    neighbor, the plan of MiniLM took 124 s; with one thread, 25 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, usable_cores() - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(job: Job) -> None:
    """Load the model and its data, and check everything that would otherwise fail after calibration."""
    with job.timer("load model and data"):
        job.work = job.load(job.timer, job.kept, job.target)
        job.fixed = settle_axes(job.context, job.graphs, job.config.export.opset, job.target)
    job.config = config = job.work.fit(job.config)
    settings = dump_yaml(config)
    (job.target / "config.yaml").write_text(settings, encoding="utf-8")
    examples = job.examples
    # Calibration samples are compared when they are distributed.
    distributed = {
        "evaluation": examples.evaluation,
        "tuning": examples.tuning,
        "training": examples.training,
        "check": examples.check,
    }
    require_same_work(settings, job.model, {**distributed, "head": examples.head})
    job.engines = RunEngines(job.context, config, job.target, job.graphs)
    max_drop = None if config.fallback is None else config.fallback.max_drop
    job.budget = job.work.budget(max_drop, checked=config.qat is None and job.engines.runs_here)
    job.budget.warn("fallback.max_drop")
    job.latency_fallback = RunLatencyFallback(job.context, config, job.target, job.graphs)
    require_tools({config.quantizer.backend: build_options(config)}, html="html" in config.report.formats)
    if config.quantize:
        job.quantizer = Quantizer(config.quantizer)
        check_rules(job.quantizer, job.model, config.fallback)
    check_layouts(job)
    # Scores the float model if a function does that.
    job.work.check()


def calibrate(job: Job) -> None:
    """Fit the head if the task has one, and calibrate the quantizer."""
    job.work.fit_head()
    if not job.config.quantize:
        return
    job.batches = job.graphs.calibration(in_several(job.context.feed.batches, job.examples.calibration))
    with job.timer("calibrate"):
        job.work.calibrate(job.quantizer, job.batches)
        if get_world_size() > 1:
            # All processes choose ranges and quantized values together; a single process does so on first use.
            _ = job.quantizer.plan


def choose_engine(job: Job) -> None:
    """Choose the fastest correct engine, and continue with its configuration and quantizer."""
    if (candidates := job.among) is None:
        return
    calibrated = for_all_variants(job.config, job.quantizer, candidates) if job.config.quantize else {}
    picked: list[PickedBackend] = []

    def choose() -> dict[str, Any]:
        work, samples = job.work, job.samples
        pick = pick_backend(work, job.config, calibrated, samples, job.target, candidates, fastest=job.converts)
        picked.append(pick)
        return picked[0].config.model_dump(mode="json")

    values = from_first_rank(choose, Any)
    # Its libraries and the last engine take hundreds of MiB.
    end_trial_process()
    if picked:
        job.config, job.choice, job.engines = picked[0].config, picked[0].choice, picked[0].engines
        job.fastest_float, job.references = picked[0].fastest_float, dict(picked[0].references)
        if not job.graphs.several and job.config.qat is None:
            # Without a fallback, the engine and its plan stay as they were compared.
            job.checks, job.compared = dict(picked[0].checks), job.engines.built["engine"]
            job.float_checks = dict(picked[0].float_checks)
        if picked[0].quantizer is not None:
            job.quantizer = picked[0].quantizer
    else:
        job.config = RunConfig.model_validate(values)
        if job.config.quantize:
            job.quantizer = quantizer_of(job.config, calibrated)
    (job.target / "config.yaml").write_text(dump_yaml(job.config), encoding="utf-8")


def time_groups(job: Job) -> None:
    """Measure the latency cost of each group, and keep groups in float if low precision is slower."""
    latency_costs = from_first_rank(
        partial(job.latency_fallback.measured, job.quantizer, job.engines), LatencyCosts | None
    )
    job.latency_fallback.latency_costs = latency_costs
    if latency_costs is not None and latency_costs.slower():
        job.quantizer.fallback(None, latency_costs=latency_costs)


def fall_back(job: Job) -> None:
    """Measure sensitivity, and keep the requested groups in float."""
    fallback, amp = job.config.fallback, job.config.amp or AmpConfig()
    if job.config.amp is None and fallback is None:
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

    # Runs with different budgets split the tuning samples differently, so scores cannot be shared.
    job.proxy = measured(job.quantizer) if by_metric else job.work.amp(job.quantizer, str(job.config.amp), measured)
    if fallback is not None and fallback.max_drop is None:
        choice = fallback.model_dump(include={"num", "ratio", "names", "min_speedup", "costs"})
        job.quantizer.fallback(job.proxy, latency_costs=job.latency_fallback.latency_costs, **choice)
    elif fallback is not None and fallback.max_drop is not None:
        _search(job, fallback.max_drop)


def _search(job: Job, max_drop: float, min_groups: int = 0) -> None:
    fallback = job.config.fallback
    assert fallback is not None
    assert job.proxy is not None
    evaluations, costs, latency_costs = fallback.evaluations, fallback.costs, job.latency_fallback.latency_costs
    search_fallback(
        job.context,
        job.quantizer,
        job.proxy,
        job.metric,
        max_drop,
        max_evaluations=evaluations,
        min_groups=min_groups,
        costs=costs,
        latency_costs=latency_costs,
    )


def build(job: Job) -> None:
    """Quantize, train if configured, build and compare; repeat the search until the engine meets its goals."""
    while True:
        if job.config.quantize:
            _quantize(job)
        max_drop = from_first_rank(partial(_drop_of_engine, job), float | None)
        if max_drop is not None:
            groups = len(job.quantizer.sensitivity)
            _search(job, max_drop, more_groups(job.quantizer.chosen_fallback, max_drop, groups))
        elif not job.config.quantize or job.latency_fallback.is_fast_enough(job.quantizer, job.proxy, job.engines):
            return


def _quantize(job: Job) -> None:
    """Freeze the quantized model; with QAT also the model before training."""
    job.forms, job.training = {}, None
    if job.config.qat is not None:
        job.forms["ptq"] = job.quantizer.quantize(job.model)
        # Training changes the float model, so its exported file is outdated.
        job.context.exported.clear()
        job.training = train(job.context, job.config.qat, job.quantizer, job.examples.training, job.metric)
    with job.timer("quantize"):
        job.forms["proxy" if job.training is None else "qat"] = job.quantizer.quantize(job.model)
    if job.among is None and not job.built:
        job.timer.tell_passes(job.quantizer.passes)


def _drop_of_engine(job: Job) -> float | None:
    """Build the engines, and return the drop allowed in the next search; None if the engine meets the budget."""
    if not job.config.quantize:
        job.built = job.engines.build_float()
        compare(job)
        return None
    job.built = job.engines.build(job.quantizer, job.frozen, trained=job.training is not None)
    compare(job)
    chosen, engine = job.quantizer.chosen_fallback, job.engines.load().get("engine")
    return _scored(job, lambda: job.budget.next_drop(engine, 0 if chosen is None else len(chosen.groups)), None)


def compare(job: Job) -> None:
    """Compare the outputs of the engine with the proxy and the float model, at several sizes.

    A dynamic-shape engine that is wrong is replaced by fixed-shape engines. An engine that is still wrong is rejected.
    """
    if job.built["engine"] is job.compared:
        return
    job.checks, job.only_sizes, job.distances = {}, (), ()
    job.alone.pop("engine", None)
    job.refused.pop("engine", None)
    with job.timer("compare the outputs"):
        try:
            # The check of an engine on another machine's GPU needs them too.
            job.references = _references(job)
            if job.engines.runs_here:
                job.checks = _checked_engine(job, "engine", job.frozen, job.tolerance(quantized=job.config.quantize))
            else:
                job.distances = tuple(_of_proxy(job, job.graphs.checked_on(job.config, job.samples)))
        except WrongEngineError as wrong:
            job.checks = {QUANTIZED_STEM: tuple(wrong.checks)}
            _refuse(job, str(wrong))
        except EngineError as error:
            # Keep all measurements; the verdict says that the outputs were not compared.
            job.timer.say(f"warning: {error}")
    job.built = job.engines.built
    job.compared = job.built["engine"]


def _references(job: Job) -> dict[str, References]:
    """Return references for the outputs of an engine, with the float outputs that are known."""
    # Training changes the float model.
    if job.references and job.training is None:
        floats = job.graphs.checked_modules(job.model)
        return {name: known.of_one(floats[name]) for name, known in job.references.items()}
    batches = job.graphs.checked_on(job.config, job.samples)
    apart = job.context.feed.samples_independent
    return {name: References(of_graph, apart=apart) for name, of_graph in batches.items()}


def _of_proxy(job: Job, batches: Mapping[str, Sequence[Batch]]) -> Iterator[OutputDistance]:
    """Yield the distance of the frozen model's outputs from the float model, if no engine runs on this machine."""
    floats, frozen = job.graphs.modules(job.model), job.graphs.modules(job.frozen)
    for name in job.graphs.names:
        graph_batches = batches[name][:1] if job.graphs.several else batches[name]
        for distance in output_distances(
            floats[name], frozen[name], None, graph_batches, apart=job.context.feed.samples_independent
        ):
            yield replace(distance, output=_named(job, name, distance.output))


def _named(job: Job, graph: str, output: str) -> str:
    return f"{graph}: {output}" if job.graphs.several else output


def score_models(job: Job) -> None:
    """Score the float model, and the frozen models whose scores say more than that of the engine."""
    forms = job.forms if scores_forms(job.config, here=job.engines.runs_here) else {}
    job.scorer.take({name: job.graphs.runnable(form) for name, form in {"float": job.model, **forms}.items()})


def inspect(job: Job) -> None:
    """Save the quantizer, and inspect the precisions of the engine's layers, before the engine is scored."""
    if job.config.quantize:
        job.quantizer.save(job.target / QUANTIZER)
    with job.timer("inspect the engine"):
        job.inspection = job.engines.inspect()


def score_engine(job: Job) -> None:
    """Score the engine, or a simulation of its types if it does not run on this machine."""
    loaded = job.engines.load()
    simulated = nearest_form(loaded, job.quantizer, job.model) if job.config.quantize else loaded
    frozen: dict[str, Runnable] = {name: job.graphs.runnable(form) for name, form in job.forms.items()}
    forms = frozen if scores_forms(job.config, here="engine" in loaded) else {}
    simulated = {
        name: job.graphs.runnable(one) if isinstance(one, nn.Module) else one for name, one in simulated.items()
    }
    scored = _scored(job, lambda: job.scorer.scores({**forms, **simulated}), None) if simulated else None
    job.scores = job.scorer.scores(frozen) if scored is None else scored
    if job.graphs.several:
        with job.timer("compare the generated texts"):
            job.agreement = job.graphs.agreement(job.samples, {**forms, **simulated})


def compare_float(job: Job) -> None:
    """Compare the outputs of the float engine with the float model, and keep the lowest SQNR."""
    if not job.engines.runs_here:
        return
    if not job.float_checks:
        with job.timer("compare the float engine"):
            try:
                job.float_checks = _checked_engine(job, "float", job.model, job.tolerance(quantized=False))
            except WrongEngineError as wrong:
                job.refused["float"] = str(wrong)
                job.float_engine_db = wrong.decibels
                return
            except EngineError as error:
                job.timer.say(f"warning: the float engine: {error}")
                job.float_engine_db = NOTHING_DB
                return
    decibels = [check.sqnr_db for of_graph in job.float_checks.values() for check in of_graph]
    job.float_engine_db = min((check for check in decibels if check is not None), default=None)


def _checked_engine(job: Job, name: str, model: nn.Module, bound: Tolerance) -> dict[str, tuple[OutputCheck, ...]]:
    """Return the output checks of a correct engine by graph; rebuild it for fixed sizes if necessary."""
    graphs, checks_of_graph = job.graphs, {}
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
        checks_of_graph[graph] = tuple(replace(one, output=_named(job, graph, one.output)) for one in right.checks)
        if name == "engine":
            job.only_sizes = right.only_sizes
        if right.note is not None:
            job.alone[name] = f"the {'engine' if name == 'engine' else 'float engine'} accepts {right.note}"
            job.timer.say(f"warning: {job.alone[name]}")
    job.built = job.engines.built
    return checks_of_graph


def _refuse(job: Job, why: str) -> None:
    job.refused["engine"] = why
    job.engines.refuse()
    job.timer.say(f"warning: {refusal(why, job.engines.timing.backend)}")


def _scored(job: Job, take: Callable[[], Value], otherwise: Value) -> Value:
    """Return the score of an engine; if it needs a size that the engine does not accept, reject the engine."""
    try:
        return take()
    except EngineError as error:
        if "engine" not in job.alone:
            raise
        _refuse(job, f"{job.alone.pop('engine')}, but its score needs other sizes: {error}")
        return otherwise


def benchmark(job: Job) -> None:
    """Benchmark the engines in interleaved rounds, and measure their memory if configured; skip a rejected engine."""
    loaded = {} if "engine" in job.refused else job.engines.load()
    if not loaded:
        return
    single = {name: job.engines.graphs_of(name) for name in loaded}
    context, config, name = job.context, job.config, job.engines.float_name
    if job.alone:
        # A fixed-shape engine has a model for the usual size.
        config = config.model_copy(update={"report": config.report.model_copy(update={"latency_shapes": "usual"})})
    rival = None if job.alone or job.graphs.several or "float" not in loaded else job.fastest_float
    job.latencies = measure_latency(
        context, config, job.graphs, loaded, single, name, job.samples, rival, job.engines.timed
    )
    # A ratio needs both engines.
    if config.report.diagnose and config.quantize and not job.graphs.several:
        job.memory = measure_memory(context, config, {name: built.path for name, built in job.built.items()})


def report(job: Job) -> RunRecord:
    """Write the serving files and the reports, and return the record."""
    record = record_of(job)
    for name in job.refused:
        for file in job.engines.files_of(name):
            file.unlink()
    if wants_diagnosis(job.config):
        record = with_diagnosis(record, job.context, job.quantizer, job.batches)
    record = replace(record, stages=job.stages)
    write_run_card(record, job.target, deliver(job, record))
    if record.engine is not None:
        write_layout_cards(job, record, quantized=job.config.quantize and deployed(record) != "float")
    write_reports(record, job.config.report.formats, job.target)
    job.work.write_call(job.target)
    return record


@dataclass(frozen=True)
class Stage:
    """One step of a job.

    Attributes:
        run: the function of the stage.
        names: yields the names of the lines that it prints, in order.
        of_quantized: skip the stage if nothing is quantized.
    """

    run: Callable[[Job], None]
    names: Callable[[Outline], Iterator[str]]
    of_quantized: bool = False

    def wanted(self, config: RunConfig) -> bool:
        """Return whether a configuration needs the stage."""
        return config.quantize or not self.of_quantized

    def named(self) -> AbstractContextManager[None]:
        """Return a context that adds the name of the stage to errors."""
        return named_in_errors(f"stage {self.run.__name__}")


def _loads(of: Outline) -> Iterator[str]:
    yield "load model and data"
    if of.by_function and of.scored:
        yield "score the float"


def _calibrates(of: Outline) -> Iterator[str]:
    if of.config.data.head is not None:
        yield "fit the head on float embeddings"
    if of.config.quantize:
        yield from (*(("generate calibration texts",) if of.writes else ()), "calibrate")


def _chooses(of: Outline) -> Iterator[str]:
    if of.chooses:
        yield "choose the engine"


def _times_groups(of: Outline) -> Iterator[str]:
    if of.here and not of.writes:
        yield from ("quantize", *(() if of.chooses else ("export", "build the engines")), "measure latency costs")


def _falls_back(of: Outline) -> Iterator[str]:
    if of.config.amp is not None:
        yield "measure sensitivity"
    if of.searches:
        yield "search fallback groups"


def _builds(of: Outline) -> Iterator[str]:
    if of.config.qat is not None:
        yield "train (QAT)"
    if of.config.quantize:
        yield "quantize"
    if of.changed or not of.here or ((of.writes or not of.config.quantize) and not of.chooses):
        yield from ("export", "build the engines")
    if of.changed or not of.chooses or of.writes:
        # Otherwise the choice has compared them.
        yield "compare the outputs"
    if of.checks_drop:
        yield CHECK_BY_FUNCTION if of.by_function else CHECK_ON_ROWS
    if of.config.fallback is not None and of.config.fallback.min_speedup is not None and of.here:
        yield "check the speed goal"


def _scores_models(of: Outline) -> Iterator[str]:
    if of.scored:
        forms = ["proxy"] if of.config.qat is None else ["ptq", "qat"]
        floats = () if of.scored_by_choice or of.by_function else ("float",)
        is_frozen = of.config.quantize and scores_forms(of.config, here=of.here)
        yield from (f"score the {form}" for form in (*floats, *(forms if is_frozen else ())))


def _inspects(_: Outline) -> Iterator[str]:
    yield "inspect the engine"


def _scores_engine(of: Outline) -> Iterator[str]:
    # A function has scored the engine in the check of its drop.
    if of.scored and of.here and (of.changed or not of.scored_by_choice) and not (of.by_function and of.checks_drop):
        yield "score the engine"
    if of.writes:
        yield "compare the generated texts"


def _compares_float(of: Outline) -> Iterator[str]:
    if of.here and (not of.chooses or of.writes or of.config.qat is not None):
        yield "compare the float engine"


def _benchmarks(of: Outline) -> Iterator[str]:
    if of.here:
        yield "measure latency"
    if of.here and of.writes:
        yield "measure the graphs"
    if of.here and of.config.report.diagnose and of.config.quantize and not of.writes:
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
"""The stages that all processes run."""

ALONE = (
    Stage(inspect, _inspects),
    Stage(score_engine, _scores_engine),
    Stage(compare_float, _compares_float, of_quantized=True),
    Stage(benchmark, _benchmarks),
)
"""The stages that only the first process runs, before the report."""


def stage_names(of: Outline) -> Iterator[str]:
    """Yield the names of all lines that a job prints, in order."""
    for stage in (*TOGETHER, *ALONE):
        if stage.wanted(of.config):
            with named_in_errors(f"the names of stage {stage.run.__name__}"):
                yield from stage.names(of)
    yield from _reports(of)
