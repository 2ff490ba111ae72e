"""The request for a conversion, checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantizer.common.label_texts import TEMPLATE, label_problem
from quantizer.config import QuantizerConfig
from quantizer.config.data_section import MOST_SECONDS
from quantizer.config.describe import nearest
from quantizer.config.load import quantizer_config
from quantizer.config.schema import check_formats, rule_formats
from quantizer.engines import backends
from quantizer.engines.candidates import Variant, cpu_candidates, cpu_variants
from quantizer.errors import ConfigError, EngineError, QuantizerError
from quantizer.files import checked_folder, require_sole_writer, restore_folder
from quantizer.runs.convert.data import DataSource
from quantizer.targets import AUTO, profile, profiles
from quantizer.targets.base import Problem, engine_problems
from quantizer.tasks import tasks

Sizes = tuple[int, int, int]
"""Least, usual and most."""

CONVERSION = "conversion"
"""The kind of the folder, in its marker."""

BATCH_SIZES: Sizes = (1, 8, 32)
SEQUENCE_LENGTHS: Sizes = (16, 128, 512)


def convertible_tasks() -> list[str]:
    """Return the tasks that need nothing besides their model: those without a fitted head."""
    return [name for name in tasks.names() if not tasks[name].needs_head]


@dataclass(frozen=True, kw_only=True)
class ConversionRequest:
    """A request to convert one checkpoint.

    Attributes:
        model: a local folder, a hub name, or ``package:NAME/FOLDER``.
        output: the folder to write.
        task: a registered task; None: derived from the checkpoint.
        backends: the backends to build engines for, each in a folder of its own; ``auto``: of those for this CPU, or
            of those named beside it, the engine that is fastest here is kept, in float if nothing in INT8 is faster.
        quantization: whether to quantize; otherwise the float model is converted.
        dtype: the number format of quantized operands; None: int8.
        config: a YAML file with the other settings of the quantizer; None: the default ones.
        calibration: the calibration data; needed by ``quantization``.
        rows: the number of calibration rows; None: 128, or all if there are fewer.
        column: the column of texts in a plain ``.csv`` or ``.jsonl`` file.
        max_drop: let groups of sites fall back to float until the task's score on ``tuning`` is at most so much worse.
        tuning: labelled rows for ``max_drop``.
        evaluation: labelled rows, on which all models and engines are scored at the end.
        batch_size: least, usual and most rows in a batch; None: 1, 8, 32, or less where the output has a value for
            each token of the vocabulary
        seq_len: least, usual and most tokens in a row of text; None: 16, 128, 512, or less if the model has fewer
            positions.
        new_tokens: the most tokens that a model in parts writes for a row; None: 128, or less where its decoder has
            fewer positions.
        seconds: the length to which recordings are cut or filled; None: that of their feature extractor, or 10.
        labels: the labels to choose from, for a task that takes them from the request.
        template: the text of each of them, with {} in its place.
        compute_capability: the GPU to build for ahead of time, with TensorRT-RTX.
        inference_precision: the precision of OpenVINO's computations that are not quantized; None: float32.
        tolerance: the least SQNR in dB of an engine's outputs against PyTorch's; None: the default for its types.
        threads: the number of CPU threads of engines and PyTorch.
        force: replace the folder of an earlier conversion; a folder with anything else is never replaced.
        chooses: whether the fastest engine is chosen; ``backends`` are then those for this CPU.
        variants: the engines to choose from.
        missing: backends for this CPU that are not installed, and what installs them.
    """

    model: str
    output: Path
    task: str | None = None
    backends: Sequence[str] = (AUTO,)
    quantization: bool = False
    dtype: str | None = None
    config: Path | None = None
    calibration: DataSource | None = None
    rows: int | None = None
    column: str = "text"
    max_drop: float | None = None
    tuning: DataSource | None = None
    evaluation: DataSource | None = None
    batch_size: Sizes | None = None
    seq_len: Sizes | None = None
    new_tokens: int | None = None
    seconds: float | None = None
    labels: tuple[str, ...] = ()
    template: str = TEMPLATE
    compute_capability: str | None = None
    inference_precision: str | None = None
    tolerance: float | None = None
    threads: int = 1
    force: bool = False
    chooses: bool = field(default=False, init=False)
    variants: tuple[Variant, ...] = field(default=(), init=False)
    missing: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        problems = [*self._resolve(), *self._names(), *self._quantization(), *self._sizes()]
        try:
            restore_folder(self.output)
            checked_folder(self.output, CONVERSION, replace=self.force)
            require_sole_writer(self.output)
        except QuantizerError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    def _resolve(self) -> Iterator[str]:
        """Put the backends for this CPU in the place of ``auto``: those beside it, or those that take the options."""
        if AUTO not in self.backends:
            return
        among = names = tuple(name for name in self.backends if name != AUTO)
        missing: tuple[str, ...] = ()
        # Names that are unknown, or there twice, are told of with the other problems of names.
        if set(names) <= set(backends.names()) and len(set(names)) == len(names):
            try:
                names, missing = cpu_candidates(names)
            except EngineError as error:
                yield f"--backend {' '.join(self.backends)}: {error}"
        fit = [
            name
            for name in names
            if not self._settings_problems([name])
            and self.dtype in (None, *profile(name).activation_dtypes)
            and self.inference_precision in (None, *profile(name).inference_precisions)
        ]
        chosen = {"backends": tuple(fit) or names, "chooses": True, "missing": missing}
        if set(names) <= set(backends.names()):
            dtype = (self.dtype or "int8") if self.quantization else None
            chosen["variants"] = cpu_variants(
                fit or names,
                dtype=dtype,
                precision=self.inference_precision,
                dynamic=not self._says_ranges(),
                named=bool(among),
            )
        for field_name, value in chosen.items():
            object.__setattr__(self, field_name, value)

    def _names(self) -> Iterator[str]:
        for name in dict.fromkeys(self.backends):
            if name not in (*backends.names(), AUTO):
                yield f"--backend {name}: unknown; expected {AUTO}, or some of {', '.join(backends.names())}"
        if not (self.backends or self.chooses) or len(set(self.backends)) < len(self.backends):
            yield f"--backend {' '.join(self.backends) or '(none)'}: expected at least one, each of them once"
        if self.task is not None and self.task not in convertible_tasks():
            near = nearest(self.task, convertible_tasks())
            hint = f"; did you mean {near!r}?" if near else ""
            yield f"--task {self.task}: unknown; expected one of {', '.join(convertible_tasks())}{hint}"
        ahead_of_time = [name for name in profiles.names() if profile(name).capabilities]
        chosen = [name for name in ahead_of_time if name in self.backends]
        if self.compute_capability is not None and not chosen:
            names = " or ".join(ahead_of_time)
            yield f"--compute-capability {self.compute_capability} is for --backend {names}; leave it out"
        elif self.compute_capability is not None and not re.fullmatch("sm[0-9]{2,3}", self.compute_capability):
            yield f"--compute-capability {self.compute_capability}: expected one such as sm89"
        elif self.compute_capability is not None:
            formats = self._formats(chosen) if self.quantization else set()
            targets = [profile(name) for name in chosen]
            yield from map(_option, engine_problems(targets, formats=formats, capabilities=[self.compute_capability]))
        known = [profile(name) for name in self.backends if name in backends.names()]
        yield from map(_option, engine_problems(known, precision=self.inference_precision))

    def _quantization(self) -> Iterator[str]:
        if not self.quantization:
            given: dict[str, object] = {"--calibration": self.calibration, "--rows": self.rows, "--dtype": self.dtype}
            for option, value in {**given, "--config": self.config, "--max-drop": self.max_drop}.items():
                if value is not None:
                    yield f"{option} {value} is used with --quantization only; add that, or leave this out"
        elif self.calibration is None:
            yield (
                "--quantization needs data to calibrate on, and --calibration is missing: give 100 or more texts or "
                "images like those that the model will see, such as --calibration texts.txt with one a line, or a "
                "folder of images or recordings"
            )
        if self.max_drop is not None and self.tuning is None:
            yield (
                f"--max-drop {self.max_drop} is a drop of the task's score, and there is nothing to score on: give "
                "labelled rows, such as --tuning text-csv:dev.csv or image-folder:dev"
            )
        if self.max_drop is None and self.tuning is not None:
            yield f"--tuning {self.tuning} is used by --max-drop only; leave it out, or name it --evaluation"
        if self.tuning is not None and self.tuning == self.evaluation:
            yield (
                f"--tuning and --evaluation are both {self.tuning}: a score on rows that the choice was made on is "
                "better than the model; give other rows"
            )
        for name in self.backends:
            if self.dtype is None or name not in backends.names():
                continue
            known = profile(name).activation_dtypes
            if self.dtype not in known:
                yield f"--dtype {self.dtype}: {name} does not compute in it; expected {' or '.join(sorted(known))}"
        yield from self._settings_problems([name for name in self.backends if name in backends.names()])

    def settings(self, backend: str) -> QuantizerConfig:
        """Return the settings of the quantizer for a backend."""
        found = quantizer_config(self.config, backend=backend, dtype=self.dtype or "int8")
        check_formats(found)
        return found

    def _settings_problems(self, names: Iterable[str]) -> list[str]:
        """Return what is wrong with the file of settings for backends; that one lacks the dtype is told elsewhere."""
        if self.config is None:
            return []
        try:
            said = quantizer_config(self.config).model_fields_set & {"backend", "dtype"}
        except ConfigError as error:
            return list(error.problems)
        if said:
            return [f"--config {self.config}: {name} is given by --{name}; leave it out there" for name in sorted(said)]
        found = []
        for name in names:
            if self.dtype in (None, *profile(name).activation_dtypes):
                try:
                    self.settings(name)
                except ConfigError as error:
                    found += [f"--config {self.config}: {problem}" for problem in error.problems]
        return list(dict.fromkeys(found))

    def _says_ranges(self) -> bool:
        """Return whether the file of settings says when ranges are taken; a wrong one is told of with the others."""
        if self.config is None or self._settings_problems([]):
            return False
        return "ranges" in quantizer_config(self.config).activations.model_fields_set

    def _formats(self, names: Sequence[str]) -> set[str]:
        """Return the formats of the plan, as far as they are known without a wrong file."""
        found = {self.dtype or "int8"}
        for name in names if self.config is not None and not self._settings_problems(names) else ():
            for rule in rule_formats(self.settings(name)):
                found |= {dtype.name for dtype in (rule.activations, rule.weights) if dtype is not None}
        return found

    def _sizes(self) -> Iterator[str]:
        for option, sizes in (("--batch-size", self.batch_size), ("--seq-len", self.seq_len)):
            if sizes is not None and not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                shown = " ".join(map(str, sizes))
                yield f"{option} {shown}: expected the least, the usual and the most, with 1 <= least <= usual <= most"
        if self.seq_len is not None and self.seq_len[0] == 1:
            yield "--seq-len 1 ...: expected 2 or more; a text has a first and a last token at least"
        for option, value in (("--rows", self.rows), ("--threads", self.threads), ("--new-tokens", self.new_tokens)):
            if value is not None and value < 1:
                yield f"{option} {value}: expected 1 or more"
        if self.seconds is not None and not 0 < self.seconds <= MOST_SECONDS:
            yield f"--seconds {self.seconds:g}: expected more than 0 and at most {MOST_SECONDS}"
        if problem := label_problem(self.labels, self.template):
            yield f"--labels: {problem}"
        if self.max_drop is not None and not self.max_drop >= 0:
            yield f"--max-drop {self.max_drop}: expected 0 or more, in the unit of the task's score"


def _option(problem: Problem) -> str:
    return f"--{problem.place.replace('_', '-')}: {problem.text}"
