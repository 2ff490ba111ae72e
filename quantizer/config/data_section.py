"""The ``model:`` and ``data:`` sections: the float model, its task, and the samples of each stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import expanduser, realpath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from quantizer.config.describe import Slot
from quantizer.config.quantizer_section import Expects, OneOf, Section, Text, TextList, reject
from quantizer.utils.registry import TASKS

PLACE = "{}"
TEMPLATE = f"This is a photo of {PLACE}."
"""Default text of a label, as in the pipeline of transformers."""


def label_texts(labels: Sequence[str], template: str) -> dict[str, str]:
    """Return the text of each label: the template with ``{}`` replaced by the label."""
    return {label: template.replace(PLACE, label) for label in labels}


def label_problem(labels: Sequence[str], template: str) -> str | None:
    """Return the problem of labels or their template as text; None if they are valid."""
    duplicate = next((label for label in labels if labels.count(label) > 1), None)
    if len(labels) == 1 or "" in labels or duplicate is not None:
        problem = "only one label" if len(labels) == 1 else "an empty label" if "" in labels else f"{duplicate!r} twice"
        return f"got {problem}; expected at least two different labels"
    if template.count(PLACE) != 1:
        return f"got the template {template!r}; expected a text with one {PLACE} for the label, such as {TEMPLATE!r}"
    return None


_TASKS = OneOf(TASKS)
MODULE = "module"
"""Task name of a model that was passed as a Python object."""
MOST_SECONDS = 3600
"""Maximum length of recordings in seconds: one hour."""

_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_FILE = re.compile(r"(?P<file>.*[/\\].*|.*\.py):(?P<function>[A-Za-z_]\w*)")
_FUNCTION = re.compile(f"(?!package:){_NAME}:{_NAME}")


def is_function_name(text: object) -> bool:
    """Return whether a value is a function name such as ``my_pkg.nets:build``, and not the path of a file."""
    return isinstance(text, str) and _FUNCTION.fullmatch(text) is not None and _FILE.fullmatch(text) is None


def _check_function(text: str) -> str:
    if not is_function_name(text):
        raise PydanticCustomError("function_name", "Input should be the name of a function")
    return text


FunctionName = Annotated[
    str,
    AfterValidator(_check_function),
    Expects("the name of a function as Python imports it, MODULE:FUNCTION, such as 'my_pkg.data:calibration'"),
]


class ModelConfig(Section):
    """The float model and its task: a checkpoint, or a function that returns a ``torch.nn.Module``."""

    source: Text = Field(
        description="A local folder, a Hugging Face hub name, or 'package:NAME/FOLDER' for a folder inside an "
        "installed package. Or a function that returns a torch.nn.Module, such as 'my_pkg.nets:build'; it needs "
        "inputs, and takes no task. A relative folder is resolved against the current folder, not against the "
        "YAML file."
    )
    task: Annotated[str, AfterValidator(_TASKS.check), _TASKS] | None = Field(
        default=None,
        description="Task of the checkpoint. It decides the data format and the metric. Required unless source is a "
        "function.",
    )
    attention: Literal["eager", "sdpa"] = Field(
        default="eager", description="Attention implementation of the float model."
    )
    max_length: int = Field(
        default=128,
        ge=1,
        description="Maximum length of a text in tokens; longer texts are truncated. The default shrinks to the "
        "maximum of export.dynamic.sequence.",
    )
    seconds: Annotated[
        Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None,
        Expects(f"a number of seconds, above 0 and at most {MOST_SECONDS}"),
    ] = Field(
        default=None,
        description="Longest recording in seconds; longer ones are cut. A batch is zero-padded to its longest "
        "recording, or to this length if the model accepts only one. null: the length of the model's feature "
        "extractor, or 10.",
    )
    new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens that an encoder-decoder model, such as T5 or Whisper, generates per "
        "sample. null: 128, or the decoder's maximum if that is smaller.",
    )
    labels: TextList = Field(
        default=(), description="Labels to choose from. Required by task 'zero-shot-image-classification'."
    )
    template: Text = Field(default=TEMPLATE, description="Text for each of these labels; {} stands for the label.")
    weights: Text | None = Field(
        default=None,
        description="File with the state dict of the function's module: .safetensors, or .pt or .pth with tensors "
        "only. null: the function returns a module with its weights.",
    )
    inputs: FunctionName | None = Field(
        default=None,
        description="Function that returns the calibration batches, such as 'my_pkg.data:calibration'. Required if "
        "source is a function.",
    )
    metric: FunctionName | None = Field(
        default=None,
        description="Function that scores the module or an engine, such as 'my_pkg.data:score'. It returns one "
        "number, or one number per sample; higher is better. null: outputs are compared without a score.",
    )

    # A validator of the last field sees all others, and also runs if one of them is invalid.
    @field_validator("metric")
    @classmethod
    def _fits_the_source(cls, metric: str | None, info: ValidationInfo) -> str | None:
        """Check that a function has inputs, a checkpoint has a task, and neither has keys of the other."""
        values = {**info.data, "metric": metric}
        source = values.get("source")
        if source is None or "task" not in values:
            return metric
        if values["task"] is None and is_function_name(source):
            problems = list(_of_function(values))
        else:
            problems = list(_of_checkpoint(source, values))
        problem = "labels" in values and "template" in values and label_problem(values["labels"], values["template"])
        if problem:
            problems.append(("/model.labels", problem))
        if problems:
            reject(*problems)
        return metric

    @property
    def texts(self) -> dict[str, str]:
        """The text of each label."""
        return label_texts(self.labels, self.template)


class DatasetConfig(Section):
    """Samples of one data set."""

    name: Text = Field(description="Name of a registered data set, such as 'stsb-csv' or 'vader'.")
    path: Text | None = Field(
        default=None,
        description="File or folder of the samples, for data sets that read one. A relative path is resolved "
        "against the current folder, not against the YAML file.",
    )
    split: Text | None = Field(default=None, description="Name of the split, for data sets with several.")
    samples: int | None = Field(default=None, ge=1, description="Number of samples to read. null: all.")
    offset: int = Field(default=0, ge=0, description="Number of samples to skip at the start.")
    subset: Text | None = Field(default=None, description="Part of the data set, such as 'movieReviewSnippets'.")

    def overlaps(self, other: DatasetConfig) -> bool:
        """Return whether the two data sets share samples, or may share some."""
        if self._source != other._source:
            return False
        if self.split != other.split:
            # Without a split, the data set mixes the samples of all splits: offset and samples prove nothing.
            return None in (self.split, other.split)
        first, second = sorted((self, other), key=lambda dataset: dataset.offset)
        return first.samples is None or second.offset < first.offset + first.samples

    @property
    def _source(self) -> tuple[str | None, ...]:
        return self.name, None if self.path is None else realpath(expanduser(self.path)), self.subset


class DataConfig(Section):
    """The samples of each stage, for checkpoints."""

    calibration: DatasetConfig | None = Field(
        default=None,
        description="Samples for the estimation of activation ranges. Required unless model.source is a function or "
        "quantize is false.",
    )
    evaluation: DatasetConfig | None = Field(
        default=None,
        description="Labelled samples for the final scores. null: outputs are compared without a score.",
    )
    check: DatasetConfig | None = Field(
        default=None,
        description="Samples for the comparison of engines with PyTorch and for benchmarks. null: the samples of "
        "evaluation, or of calibration.",
    )
    tuning: DatasetConfig | None = Field(
        default=None,
        description="Labelled samples that score the candidates of a search; they must not overlap evaluation. "
        "Required by fallback.max_drop, amp.measure 'metric' and qat.",
    )
    training: DatasetConfig | None = Field(
        default=None,
        description="Samples for quantization-aware training (qat); they must not overlap evaluation or tuning.",
    )
    head: DatasetConfig | None = Field(
        default=None,
        description="Samples on which the classifier is fitted. Required by task 'embedding-classification'.",
    )
    batch_size: int = Field(
        default=32, ge=1, description="Samples per batch. The default shrinks to the maximum of export.dynamic.batch."
    )

    def problems_with(self, model: ModelConfig | None, *, quantize: bool) -> list[tuple[str, str]]:
        """Return the key and the text of each problem: missing or unused data sets.

        Args:
            model: the valid ``model`` section; None if it has problems of its own.
            quantize: whether the run quantizes the model.
        """
        if model is not None and model.task is None:
            ignored = [name for name in type(self).model_fields if getattr(self, name) != _default(type(self), name)]
            text = f"is not used, because model.inputs ({model.inputs}) returns the batches; remove it"
            return [(name, text) for name in ignored]
        if model is None and not self.model_fields_set:
            return []
        if quantize and self.calibration is None:
            return [("calibration", f"is missing; expected {Slot(DatasetConfig).expected()}")]
        used = ("calibration", "tuning", "training")
        unused = [] if quantize else [name for name in used if getattr(self, name) is not None]
        return [(name, "is not used, because quantize is false; remove it") for name in unused]


def _of_function(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the key and text of each problem of a model whose source is a function."""
    problems = [
        (f"/model.{name}", f"is not used, because the source is a function ({values['source']}); remove it")
        for name in ("attention", "max_length", "seconds", "new_tokens", "labels", "template")
        if name in values and values[name] != _default(ModelConfig, name)
    ]
    if "inputs" in values and values["inputs"] is None:
        expected = "expected the function that returns the batches to calibrate on, such as 'my_pkg.data:calibration'"
        problems.append(("/model.inputs", f"is missing; {expected}"))
    return problems


def _of_checkpoint(source: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the key and text of each problem of a model whose source is a checkpoint or an invalid function name."""
    used = [name for name in ("weights", "inputs", "metric") if values.get(name) is not None]
    if values["task"] is not None:
        if used and is_function_name(source):
            return [("/model.task", f"is for checkpoints, but source is a function ({source}); remove it")]
        text = "is only for a source that is a function, such as 'my_pkg.nets:build'; remove it"
        return [(f"/model.{name}", text) for name in used]
    file = _FILE.fullmatch(source)
    if file is not None:
        module = re.sub(r"[/\\]+", ".", file["file"].removeprefix("./").removesuffix(".py"))
        function_name = f"{module}:{file['function']}"
        hint = f"'{function_name}'" if is_function_name(function_name) else "'my_pkg.nets:build'"
        text = f"got the file {source!r}; expected its module name, as Python imports it from the current folder"
        return [("/model.source", f"{text}: {hint}")]
    if used:
        text = f"got {source!r} with {' and '.join(used)}; expected a function, such as 'my_pkg.nets:build'"
        return [("/model.source", text)]
    known = Slot(str, (_TASKS,)).expected()
    return [("/model.task", f"is missing; expected {known}; only a function such as 'my_pkg.nets:build' needs no task")]


def _default(section: type[Section], name: str) -> Any:
    return section.model_fields[name].default
