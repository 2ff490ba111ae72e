"""The record of a run as frozen data, and its JSON.

Every dataclass here, and in ``utils/records.py``, is one object of ``report.json``. The text under a field documents
it, and ``docs/report-format.md`` is generated from these texts. All ratios are float divided by this, so larger is
better. A field that is added, removed or changed in meaning needs a new :data:`VERSION`.

JSON has no infinity and no NaN: they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.

Reading and atomic writing of ``report.json``.

A setting as a reader can give it: keywords of a call where the model was given in Python, else YAML of a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml

from quantizer.errors import QuantizerError
from quantizer.utils.files import whole_file
from quantizer.utils.paths import regular_file
from quantizer.utils.plain_values import decoded, json_values, yaml_values
from quantizer.utils.records import (
    BudgetOutcome,
    Diagnosis,
    EngineCheck,
    Evaluation,
    FallbackRecord,
    Fix,
    GroupSensitivity,
    GroupTime,
    Histogram,
    Inspection,
    Layer,
    Operand,
    PrecisionShare,
    RangeCandidate,
    Record,
    Score,
    Site,
    UnquantizedProduct,
    quantized_score,
)

__all__ = [
    "Agreement",
    "BudgetOutcome",
    "Candidate",
    "Diagnosis",
    "Fix",
    "EngineCheck",
    "EngineChoice",
    "EngineFile",
    "Evaluation",
    "FallbackRecord",
    "GroupSensitivity",
    "GroupTime",
    "Histogram",
    "Inspection",
    "Latency",
    "LatencyEntry",
    "Layer",
    "MemoryEntry",
    "ModelInfo",
    "Operand",
    "OutputDistance",
    "LatencyFallback",
    "FallbackPoint",
    "PrecisionShare",
    "RangeCandidate",
    "RunRecord",
    "Score",
    "Site",
    "SizeEntry",
    "SpeedCheck",
    "Stage",
    "TrainingRun",
    "TrainingScore",
    "UnquantizedProduct",
    "VERSION",
]


VERSION = 10


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Record):
    """The model that the run started from."""

    source: str
    """Where the model came from: a folder, a hub name, or ``package:NAME/FOLDER``."""
    task: str
    """The task of the model, such as ``sentence-similarity``."""
    parameters: int
    """Number of parameters of the float model."""


@dataclass(frozen=True, kw_only=True)
class LatencyEntry(Record):
    """The time that one batch takes in one engine."""

    name: str
    """The engine; ``float`` names the reference and ``engine`` the quantized engine of this run."""
    median_ms: float
    """Median time of one batch, in milliseconds."""
    min_ms: float
    """Shortest time of one batch, in milliseconds."""
    max_ms: float
    """Longest time of one batch, in milliseconds."""
    quartiles_ms: tuple[float, float] | None = None
    """First and third quartile of the times: half of them lie between; null if there were fewer than four."""
    ratio_to_float: float
    """Speed-up: the float median divided by this median; above 1 is faster."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """Texts that one form of the model wrote beside those of the float model."""

    which: str
    """Which form: ``proxy``, ``engine`` or ``simulation``."""
    samples: int
    """Number of texts."""
    tokens: float
    """Share of places with the same token."""
    texts: float
    """Share of texts with the same tokens."""


@dataclass(frozen=True, kw_only=True)
class Latency(Record):
    """Latencies of all engines, measured interleaved in one run."""

    graph: str | None = None
    """The graph of a model of several, such as ``encoder_model``; null: the whole model."""

    batch: int
    """Samples in the batch."""
    sequence: int | None
    """Tokens in each example; null for a model without a sequence."""
    threads: int
    """Threads that each engine may use."""
    reference: str
    """What the speed-ups are relative to, the entry ``float``: the float engine's backend and type, such as ``openvino
    float32`` or ``openvino bfloat16``, or ``PyTorch float``."""
    engines: tuple[LatencyEntry, ...]
    """One entry per engine, the float reference first."""


@dataclass(frozen=True, kw_only=True)
class SizeEntry(Record):
    """The size of one form of the model on disk."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    bytes: int
    """Size in bytes."""
    ratio: float
    """The float size divided by this size; above 1 is smaller."""


@dataclass(frozen=True, kw_only=True)
class MemoryEntry(Record):
    """The memory of one form of the model while it runs."""

    name: str
    """The form; ``float`` names the reference and ``engine`` the quantized one."""
    peak_mib: float
    """Peak resident memory in MiB while the engine loads and runs in a process of its own, less the memory of that
    process before."""
    ratio: float
    """The float peak divided by this peak; above 1 is less memory."""


@dataclass(frozen=True, kw_only=True)
class EngineFile(Record):
    """The engine that was built."""

    backend: str
    """Backend it was built for, such as ``openvino``."""
    path: str
    """Its file, relative to the run folder."""
    build_seconds: float
    """Time to build it, in seconds."""
    verified: str
    """What was checked on the engine, and the result."""


@dataclass(frozen=True, kw_only=True)
class Stage(Record):
    """One stage of the run."""

    name: str
    """Name of the stage."""
    seconds: float
    """How long it took, in seconds."""
    inside: str | None = None
    """The stage that it was a part of, whose time holds its own; null: it stands by itself."""


_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """An engine that was tried."""

    backend: str
    """Its backend, such as ``openvino``."""
    format: str
    """What its products are in: ``int8``, ``int8+bfloat16`` where all else is in bfloat16, ``int8 dynamic`` with ranges
    that are taken at run time; ``float32`` or ``bfloat16`` for an engine of the float model."""
    milliseconds: tuple[float, ...] = ()
    """Median latency at each shape of the choice, all candidates interleaved; empty if it failed, and without the last
    shapes if it was too slow at those before."""
    score_difference: float | None = None
    """Its score less that of the float model, on the samples with labels; null where there are none."""
    sqnr_db: float | None = None
    """The least SQNR of its outputs in dB against the float model's in PyTorch at the shapes of the choice; null if
    they are equal or it failed."""
    verdict: str = ""
    """Why it was chosen, or why not."""

    @property
    def name(self) -> str:
        """Backend and format."""
        return f"{self.backend} {self.format}"

    @property
    def is_float(self) -> bool:
        """True for an engine of the float model."""
        return self.format in _FLOATS

    def times_of(self, other: Candidate) -> float:
        """Return how many times as long as another one it takes: the geometric mean over the shapes that both have."""
        pairs = list(zip(self.milliseconds, other.milliseconds, strict=False))
        return math.exp(sum(math.log(mine / its) for mine, its in pairs) / len(pairs))


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Record):
    """A choice of the fastest engine that computes what it should."""

    headline: str
    """What was chosen, and the fastest engine in float, or why nothing in low precision is faster."""
    instructions: str | None
    """The CPU's instruction sets for which the choice holds; null if the system does not tell."""
    shapes: tuple[str, ...]
    """The shapes at which all were timed."""
    candidates: tuple[Candidate, ...]
    """All that were tried, the chosen one first, then by time; those that failed at the end."""
    deploy: str = ""
    """The file of a run's folder that is the fastest in the end, and its speed beside the other one's; empty if it was
    not compared."""
    missing: tuple[str, ...] = ()
    """Candidates whose library is not installed, and what installs it."""


ALIKE_DB = 30.0
"""SQNR of an engine's output to its proxy's that is always enough for a quantized model."""


FURTHER_DB = 3.0
"""Sums in another order move a few values to the neighbouring step, and these move others in later layers. A correct
engine's error is then another sample of the quantization error: as large as the proxy's, but different. So an engine
is right, too, if the power of its error against the float model is at most twice that of the proxy."""


@dataclass(frozen=True, kw_only=True)
class OutputDistance(Record):
    """The distance of one output to that of the float model, on one batch."""

    output: str
    """Name of the output."""
    batch: int
    """Samples of the batch."""
    sequence: int | None = None
    """Tokens in a sample of it; null: rows are no texts."""
    sqnr_db: float | None = None
    """SQNR in dB of the engine's output, or of the proxy's if the engine did not run; null: there is no difference."""
    cosine: float
    """Mean cosine of its vectors to the float model's."""
    proxy_sqnr_db: float | None = None
    """SQNR in dB of the proxy's output; null: there is no difference."""
    engine_to_proxy_db: float | None = None
    """SQNR in dB of the engine's output to the proxy's; null: there is no difference, or the engine did not run."""
    noise_sqnr_db: float | None = None
    """Least SQNR in dB of the proxy's output with the noise of float sums; null: it was not needed, or not taken."""
    engine: bool
    """Whether the engine ran."""

    @property
    def is_alike(self) -> bool:
        """True for an engine that computes what its proxy does, with sums in an order of its own, or did not run."""
        if self.engine_to_proxy_db is None or self.engine_to_proxy_db >= ALIKE_DB or self.sqnr_db is None:
            return True
        return is_no_further(self.sqnr_db, (self.proxy_sqnr_db, self.noise_sqnr_db), FURTHER_DB)


def is_no_further(engine: float | None, pytorch: Sequence[float | None], decibels: float) -> bool:
    """Return whether an engine is at most so much further from the float model than PyTorch at its worst.

    Args:
        engine: the SQNR in dB of the engine's output; None: there is no difference.
        pytorch: those of PyTorch's, likewise.
        decibels: how much further.
    """
    known = [one for one in pytorch if one is not None]
    return engine is None or (bool(known) and engine >= min(known) - decibels)


def worst_output(outputs: Sequence[OutputDistance]) -> OutputDistance | None:
    """Return the output with the lowest SQNR; None: there is none."""
    return min(outputs, key=lambda one: math.inf if one.sqnr_db is None else one.sqnr_db, default=None)


@dataclass(frozen=True, kw_only=True)
class FallbackPoint(Record):
    """A plan between everything in low precision and everything in float."""

    back: int
    """How many groups are float in it."""
    milliseconds: float
    """Its predicted latency."""
    error: float
    """The sum of the errors of the groups that stay quantized, by the measure of the sensitivity."""


@dataclass(frozen=True, kw_only=True)
class SpeedCheck(Record):
    """An engine that was timed against ``fallback.min_speedup``."""

    groups: int
    """How many groups were float for the accuracy."""
    speedup: float
    """How many times as fast as in float it was."""


@dataclass(frozen=True, kw_only=True)
class LatencyFallback(Record):
    """The times of all groups of a plan, and the plan that was taken."""

    where: str
    """The backend, the shape and the threads of the times."""
    low_ms: float
    """Milliseconds of the engine with all groups in low precision."""
    float_ms: float
    """Milliseconds of the engine of the float model."""
    predicted_ms: float
    """Predicted milliseconds of the plan that was taken."""
    back: int
    """How many groups are float in it."""
    groups: tuple[GroupTime, ...]
    """The groups, the largest gain in low precision first."""
    frontier: tuple[FallbackPoint, ...] = ()
    """The plans that put one group more back at a time, the highest error per microsecond first; empty without
    sensitivity."""
    min_speedup: float | None = None
    """How many times as fast as in float the engine had to be; null if that was not asked for."""
    checks: tuple[SpeedCheck, ...] = ()
    """The engines that were timed against it, the last of them delivered."""

    @property
    def speedup(self) -> float | None:
        """Speed of the delivered engine, in that of the float one; None: none was asked for, or it was not timed."""
        return self.checks[-1].speedup if self.min_speedup is not None and self.checks else None


@dataclass(frozen=True, kw_only=True)
class TrainingScore(Record):
    """A score on the tuning samples before or during training."""

    step: int
    """The number of steps before this score; 0 is the score of PTQ."""
    score: float
    """The metric."""
    best: bool = False
    """Whether the model of this score was kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Record):
    """The quantization-aware training."""

    metric: str
    """Name of the metric."""
    higher_is_better: bool
    """Whether a higher value is better."""
    planned: int
    """The number of steps that were planned."""
    losses: tuple[float, ...]
    """The loss of each step: the distance of the outputs of its batch from those of the float model."""
    scores: tuple[TrainingScore, ...]
    """The scores on the tuning samples, in order."""
    float_score: float
    """The float model's score on the tuning samples."""
    stopped: str | None = None
    """Why training ended before the planned steps; null if it did not."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """The whole run; the top object of ``report.json``."""

    version: int = VERSION
    """Version of this format; a reader takes no other one."""
    name: str
    """Name of the run."""
    created: str
    """When the run started, ISO 8601 with time zone."""
    config: Mapping[str, Any]
    """The resolved configuration, every default filled in."""
    model: ModelInfo
    """The model that the run started from."""
    fixed: tuple[str, ...] = ()
    """Sizes of inputs that an engine takes alone, a sentence each: the model fixes them, or the backend computes its
    model for all sizes wrongly. Empty: none."""
    scores: tuple[Score, ...] = ()
    """Scores of float, proxy and engine or simulation; empty if nothing was evaluated."""
    agreement: tuple[Agreement, ...] = ()
    """How far the texts of each form are those of the float model; empty: the model writes none."""
    outputs: tuple[OutputDistance, ...] = ()
    """The distance of each output to that of the float model; empty if it was not measured."""
    float_engine_db: float | None = None
    """SQNR in dB of the float engine's worst output to the float model's in PyTorch; null: there is no difference, or
    it was not compared."""
    engine_refused: str | None = None
    """How wrong the engine's outputs are, at which size; such an engine is not in the folder. Null: they are right, or
    were not compared."""
    float_engine_refused: str | None = None
    """The same of the engine of the float model."""
    latency: Latency | None = None
    """Latencies; null if they were not measured."""
    other_latencies: tuple[Latency, ...] = ()
    """Latencies at the other sizes at which they were measured, and those of single graphs; empty: none."""
    size: tuple[SizeEntry, ...] = ()
    """Sizes on disk; empty if they were not measured."""
    memory: tuple[MemoryEntry, ...] = ()
    """Peak memory; empty if it was not measured."""
    coverage: tuple[Site, ...] = ()
    """All sites, quantized or not."""
    covered_share: float | None = None
    """Share in low precision of all multiply-adds that torch executed in calibration, in sites or not; null: none."""
    not_quantized: tuple[UnquantizedProduct, ...] = ()
    """The products that do not run in low precision, the largest first, each with its reason."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of the quantized activations with the lowest SQNR, the lowest first; empty if none were kept."""
    sensitivity: tuple[GroupSensitivity, ...] = ()
    """The ranking of groups; empty if it was not measured."""
    measure: str | None = None
    """The measure of the ranking's errors: ``gradient`` (the divergence of the output, estimated from gradients),
    ``loss`` (the effect on the user's loss, estimated from gradients), ``output`` (the divergence of the output),
    ``local`` (the relative error at the sites), ``metric`` (the drop of the metric). The divergence is the
    Kullback-Leibler divergence of logits, or the relative error of any other output. Null if nothing was measured."""
    diagnoses: tuple[Diagnosis, ...] = ()
    """The groups that cost most, the worst first, each with its cause and its fix; empty if the run has no ``amp``."""
    diagnosis_error: str | None = None
    """The error that ended the diagnosis; null if it did not fail."""
    fallback: FallbackRecord | None = None
    """The groups that fell back to float; null if none did."""
    training: TrainingRun | None = None
    """The quantization-aware training; null if there was none."""
    choice: EngineChoice | None = None
    """The choice of the backend by measured time; null if the configuration named one."""
    latency_fallback: LatencyFallback | None = None
    """What quantizing each group is worth in time; null where no engine was timed."""
    engine: EngineFile | None = None
    """The engine; null if none was built, or it was refused."""
    inspection: Inspection | None = None
    """The precision of each layer of the engine, or what the ONNX file asks for if the engine could not be observed;
    null if none was built."""
    diff: str = ""
    """The rewritten source as a unified diff; may be long."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version of each package that the run depends on."""
    machine: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Facts of the machine: ``cpu``, ``instructions``, ``cores``, ``memory_gib``, ``os``, ``python``."""
    stages: tuple[Stage, ...] = ()
    """The stages in order, with their durations."""

    @property
    def score(self) -> Score | None:
        """The score of the form nearest to the engine; None if nothing but float was scored."""
        return quantized_score(self.scores)

    @property
    def float_score(self) -> Score | None:
        """The score of the float model; None if there is none."""
        return next((entry for entry in self.scores if entry.which == "float"), None)

    @property
    def worst_output(self) -> OutputDistance | None:
        """The output with the lowest SQNR; None if none was compared."""
        return worst_output(self.outputs)

    @property
    def speeds(self) -> tuple[LatencyEntry, LatencyEntry] | None:
        """The latency of the engine and of the float one; None if they were not timed."""
        return None if self.latency is None else pair(self.latency.engines)

    @property
    def sizes(self) -> tuple[SizeEntry, SizeEntry] | None:
        """The size of the engine and of the float model; None if they were not measured."""
        return pair(self.size)

    @property
    def peaks(self) -> tuple[MemoryEntry, MemoryEntry] | None:
        """The memory of the engine and of the float model; None if it was not measured."""
        return pair(self.memory)


_FEWEST_FOR_QUARTILES = 4


Entry = TypeVar("Entry", LatencyEntry, SizeEntry, MemoryEntry)


def latency_entries(times_ms: Mapping[str, Sequence[float]]) -> tuple[LatencyEntry, ...]:
    """Return median, extremes, quartiles and speed-up of each engine, from the times of all its batches."""
    empty = [name for name, times in times_ms.items() if not times]
    if empty:
        raise QuantizerError(f"latency of {empty[0]!r}: no times; give at least one")
    medians = {name: float(statistics.median(times)) for name, times in times_ms.items()}
    ratios = _ratios(medians, "latency")
    return tuple(
        LatencyEntry(
            name=name,
            median_ms=medians[name],
            min_ms=float(min(times)),
            max_ms=float(max(times)),
            quartiles_ms=_quartiles(times),
            ratio_to_float=ratios[name],
        )
        for name, times in times_ms.items()
    )


def size_entries(sizes_bytes: Mapping[str, int]) -> tuple[SizeEntry, ...]:
    """Return size and ratio of each form; errors are those of :func:`latency_entries`."""
    ratios = _ratios(sizes_bytes, "size")
    return tuple(SizeEntry(name=name, bytes=int(size), ratio=ratios[name]) for name, size in sizes_bytes.items())


def memory_entries(peaks_mib: Mapping[str, float]) -> tuple[MemoryEntry, ...]:
    """Return peak memory and ratio of each form; errors are those of :func:`latency_entries`."""
    ratios = _ratios(peaks_mib, "memory")
    return tuple(MemoryEntry(name=name, peak_mib=float(peak), ratio=ratios[name]) for name, peak in peaks_mib.items())


def pair(entries: Sequence[Entry]) -> tuple[Entry, Entry] | None:
    """Return the entry of the headline and the reference; None if there are not both.

    The reference is named ``float``, or is the first; the other one is named ``engine``, or is the last.
    """
    reference = next((entry for entry in entries if entry.name == "float"), next(iter(entries), None))
    others = [entry for entry in reversed(entries) if entry is not reference]
    headline = next((entry for entry in entries if entry.name == "engine"), next(iter(others), None))
    return None if reference is None or headline is None else (headline, reference)


def reference_words(latency: Latency) -> str:
    """Return what speed-ups are relative to: ``the float engine (openvino bfloat16)``, ``the model in PyTorch``."""
    if latency.reference.startswith("PyTorch"):
        return "the model in PyTorch, in float"
    return f"the float engine ({latency.reference})"


def _quartiles(times: Sequence[float]) -> tuple[float, float] | None:
    if len(times) < _FEWEST_FOR_QUARTILES:
        return None
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _ratios(values: Mapping[str, float], what: str) -> dict[str, float]:
    if "float" not in values:
        raise QuantizerError(f"{what}: no entry 'float' to take ratios to; there are: {', '.join(values)}")
    wrong = [name for name, value in values.items() if not value > 0]
    if wrong:
        raise QuantizerError(f"{what} of {wrong[0]!r} is {values[wrong[0]]}; expected a number above 0")
    return {name: float(values["float"] / value) for name, value in values.items()}


_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def mapping_from_record(record: RunRecord) -> dict[str, Any]:
    """Return ``record`` as JSON values."""
    mapping = {item.name: _encode(getattr(record, item.name), item.name) for item in dataclasses.fields(record)}
    record_from_mapping(mapping)  # raises on a wrong type now, not when the report is read
    return mapping


def record_from_mapping(mapping: Any, where: str = "report") -> RunRecord:
    """Return the record of which :func:`mapping_from_record` made the mapping."""
    if not isinstance(mapping, Mapping):
        raise QuantizerError(f"{where}: expected an object with the fields of a run record, got {_name(mapping)}")
    version = mapping.get("version")
    if version != VERSION or isinstance(version, bool):
        raise QuantizerError(
            f"{where}: version {version!r}, but this quantizer reads version {VERSION} only; "
            "read it with the quantizer that wrote it, or run the configuration again"
        )
    try:
        record: RunRecord = decoded(RunRecord, mapping, where, _NON_FINITE)
    except ValueError as error:
        raise QuantizerError(f"{error}; the file is broken: run the configuration again") from error
    return record


def _encode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _encode(getattr(value, item.name), f"{path}.{item.name}") for item in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _encode(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, PurePath):
        return value.as_posix()
    raise QuantizerError(
        f"{path}: a value of type {type(value).__name__} cannot be written to a report; give a string, number or list"
    )


def _name(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_text_atomic(path: Path | str, text: str) -> Path:
    """Write ``text`` as UTF-8 to a temporary file beside ``path``, then rename it to ``path``.

    After a failure or an interruption the former file is unchanged, and no temporary file is left.
    """
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_record(record: RunRecord, path: Path | str) -> Path:
    """Write ``record`` as JSON to ``path``."""
    text = json.dumps(mapping_from_record(record), indent=2, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_record(path: Path | str) -> RunRecord:
    """Return the record in a file of :func:`write_record`."""
    path = Path(path)
    try:
        values = json_values(regular_file(path).read_bytes())
    except FileNotFoundError as error:
        raise QuantizerError(f"{path}: no such file; give the folder of a finished run") from error
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizerError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise QuantizerError(f"{path}: not a JSON file ({error}); it is broken: run the configuration again") from error
    return record_from_mapping(values, str(path))


GIVEN_IN_PYTHON = "given in Python"
"""The name of a data set that a call in Python gave."""

_QUANTIZER = ("activations", "exclude", "weights")
"""Sections that a run's file holds in its ``quantizer`` section."""


def is_from_python(record: RunRecord) -> bool:
    """Return whether the run was a call of ``quantize_model``, which has no file to change."""
    data = record.config.get("data") or {}
    return (data.get("calibration") or {}).get("name") == GIVEN_IN_PYTHON


def shown_setting(setting: str, *, python: bool) -> str:
    """Return a setting to be pasted: ``exclude={"sites": ["head"]}``, or ``quantizer: {exclude: {sites: [head]}}``."""
    told: Mapping[str, Any] = yaml_values(setting.encode())
    ((section, values),) = told.items()
    if python:
        return f"{section}={_python(values)}"
    whole = {"quantizer": told} if section in _QUANTIZER else told
    return _flow(whole).removeprefix("{").removesuffix("}")


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(inside)}" for key, inside in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True).strip()
