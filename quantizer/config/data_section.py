"""The ``model:`` and ``data:`` sections: the float model, and the rows for calibration, evaluation and training.

The texts of labels, for models that compare images with texts.
"""

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
"""The text of a label in the pipeline of transformers."""


def label_texts(labels: Sequence[str], template: str) -> dict[str, str]:
    """Return the text of each label, which stands in the place of ``{}``."""
    return {label: template.replace(PLACE, label) for label in labels}


def label_problem(labels: Sequence[str], template: str) -> str | None:
    """Return what is wrong with labels or their template, in words; None: nothing is."""
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if len(labels) == 1 or "" in labels or twice is not None:
        what = "one label alone" if len(labels) == 1 else "an empty label" if "" in labels else f"{twice!r} twice"
        return f"got {what}; expected two labels or more, each of them once"
    if template.count(PLACE) != 1:
        return f"got the template {template!r}; expected a text with one {PLACE} for the label, such as {TEMPLATE!r}"
    return None


_TASKS = OneOf(TASKS)
MODULE = "module"
"""What stands for the task of a model that was given in Python."""
MOST_SECONDS = 3600
"""The limit on the length of recordings, an hour."""

_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_FILE = re.compile(r"(?P<file>.*[/\\].*|.*\.py):(?P<function>[A-Za-z_]\w*)")
_FUNCTION = re.compile(f"(?!package:){_NAME}:{_NAME}")


def is_function_name(text: object) -> bool:
    """Return whether a value is the name of a function, ``my_pkg.nets:build``, and that of no file."""
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
    """The float model and the task on which it is scored: a checkpoint, or a function that returns a module."""

    source: Text = Field(
        description="A local folder, a hub name, or 'package:NAME/FOLDER' for a folder inside an installed package; or "
        "a function that returns a torch.nn.Module, 'my_pkg.nets:build', which has inputs and no task. "
        "A relative folder is resolved against the current directory, not against the YAML file."
    )
    task: Annotated[str, AfterValidator(_TASKS.check), _TASKS] | None = Field(
        default=None,
        description="What the output of a checkpoint is used for; decides the metric. Needed unless source is a "
        "function.",
    )
    attention: Literal["eager", "sdpa"] = Field(
        default="eager", description="Attention implementation that the float model is loaded with."
    )
    max_length: int = Field(
        default=128,
        ge=1,
        description="Longer texts are cut to this many tokens; images have none. If it is not set, at most those of "
        "export.dynamic.sequence.",
    )
    seconds: Annotated[
        Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None,
        Expects(f"a number of seconds, more than 0 and at most {MOST_SECONDS}, or null"),
    ] = Field(
        default=None,
        description="Length to which recordings are cut or filled, in seconds; the engine takes no other. null: that "
        "of the model's feature extractor, or 10.",
    )
    new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The most tokens that a model in parts, such as T5 or Whisper, writes for a row; null: 128, or "
        "less where its decoder has fewer positions.",
    )
    labels: TextList = Field(
        default=(), description="Labels to choose from, for task 'zero-shot-image-classification', which needs them."
    )
    template: Text = Field(default=TEMPLATE, description="Text of a label for that task, with {} in its place.")
    weights: Text | None = Field(
        default=None,
        description="File with the state dict that the module of a function gets: .safetensors, or .pt and .pth that "
        "hold tensors alone; null: it has its weights.",
    )
    inputs: FunctionName | None = Field(
        default=None,
        description="Function that returns the batches to calibrate on, 'my_pkg.data:calibration'; needed where source "
        "is a function.",
    )
    metric: FunctionName | None = Field(
        default=None,
        description="Function that takes the module of a function, or an engine that is called as it is, and returns a "
        "number, of which more is better, or one for each row: 'my_pkg.data:score'; null: the outputs alone are "
        "compared.",
    )

    # The last field, since it reads the others, and is checked where one of these is wrong, too.
    @field_validator("metric")
    @classmethod
    def _fits_the_source(cls, metric: str | None, info: ValidationInfo) -> str | None:
        """Return ``metric`` if a function has inputs, a checkpoint a task, and none of them a key of the other."""
        given = {**info.data, "metric": metric}
        source = given.get("source")
        if source is None or "task" not in given:
            return metric
        if given["task"] is None and is_function_name(source):
            problems = list(_of_function(given))
        else:
            problems = list(_of_checkpoint(source, given))
        told = "labels" in given and "template" in given and label_problem(given["labels"], given["template"])
        if told:
            problems.append(("/model.labels", told))
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
        description="File or folder that holds the rows, where the data set reads one. A relative path is resolved "
        "against the current directory, not against the YAML file.",
    )
    split: Text | None = Field(default=None, description="Name of the split, where the data set has several.")
    samples: int | None = Field(default=None, ge=1, description="Take this many samples; null: all.")
    offset: int = Field(default=0, ge=0, description="Skip this many samples first.")
    subset: Text | None = Field(default=None, description="Part of the data set, such as 'movieReviewSnippets'.")

    def overlaps(self, other: DatasetConfig) -> bool:
        """Return whether the two data sets have, or may have, a row in common."""
        if self._source != other._source:
            return False
        if self.split != other.split:
            # Without a split the rows are those of all splits, in another order: offset and rows prove nothing.
            return None in (self.split, other.split)
        first, second = sorted((self, other), key=lambda dataset: dataset.offset)
        return first.samples is None or second.offset < first.offset + first.samples

    @property
    def _source(self) -> tuple[str | None, ...]:
        return self.name, None if self.path is None else realpath(expanduser(self.path)), self.subset


class DataConfig(Section):
    """The rows of each stage, of a model that is a checkpoint."""

    calibration: DatasetConfig | None = Field(
        default=None,
        description="Samples that the activation ranges are taken from; needed unless model.source is a function, or "
        "nothing is quantized.",
    )
    evaluation: DatasetConfig | None = Field(
        default=None,
        description="Labelled samples that the scores are measured on; null: the outputs alone are compared.",
    )
    check: DatasetConfig | None = Field(
        default=None,
        description="Samples on which engines are compared with PyTorch and timed; null: those of evaluation, or of "
        "calibration.",
    )
    tuning: DatasetConfig | None = Field(
        default=None,
        description="Samples that a choice is scored on, none of them of evaluation; needed by fallback.max_drop, by "
        "amp.measure 'metric' and by qat.",
    )
    training: DatasetConfig | None = Field(
        default=None, description="Samples that qat trains on, none of them of evaluation or tuning."
    )
    head: DatasetConfig | None = Field(
        default=None, description="Samples that the classifier is fitted on; needed by task 'embedding-classification'."
    )
    batch_size: int = Field(
        default=32, ge=1, description="Rows in one batch; by default at most as many as export.dynamic.batch has."
    )

    def problems_with(self, model: ModelConfig | None, *, quantize: bool) -> list[tuple[str, str]]:
        """Return path and text of what is missing or not used with a model; None: a model that is wrong itself."""
        if model is not None and model.task is None:
            ignored = [name for name in type(self).model_fields if getattr(self, name) != _default(type(self), name)]
            text = f"is not used: {model.inputs}, of model.inputs, gives the batches; remove it"
            return [(name, text) for name in ignored]
        if model is None and not self.model_fields_set:
            return []
        if quantize and self.calibration is None:
            return [("calibration", f"is missing; expected {Slot(DatasetConfig).expected()}")]
        used = ("calibration", "tuning", "training")
        unused = [] if quantize else [name for name in used if getattr(self, name) is not None]
        return [(name, "is used by a quantized model, and quantize is false; remove it") for name in unused]


def _of_function(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the problems of a model whose source is a function."""
    found = [
        (f"/model.{name}", f"is not used by a source that is a function, {given['source']}; remove it")
        for name in ("attention", "max_length", "seconds", "new_tokens", "labels", "template")
        if name in given and given[name] != _default(ModelConfig, name)
    ]
    if "inputs" in given and given["inputs"] is None:
        what = "expected the function that returns the batches to calibrate on, such as 'my_pkg.data:calibration'"
        found.append(("/model.inputs", f"is missing; {what}"))
    return found


def _of_checkpoint(source: str, given: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the problems of a model whose source is a checkpoint, or no name of a function."""
    used = [name for name in ("weights", "inputs", "metric") if given.get(name) is not None]
    if given["task"] is not None:
        if used and is_function_name(source):
            return [("/model.task", f"is for checkpoints, and source names a function, {source}; remove it")]
        text = "is used by a source that is a function, such as 'my_pkg.nets:build'; remove it"
        return [(f"/model.{name}", text) for name in used]
    file = _FILE.fullmatch(source)
    if file is not None:
        module = re.sub(r"[/\\]+", ".", file["file"].removeprefix("./").removesuffix(".py"))
        named = f"{module}:{file['function']}"
        hint = f"'{named}'" if is_function_name(named) else "'my_pkg.nets:build'"
        text = f"got {source!r}, the path of a file; expected its module, as Python imports it from the current folder"
        return [("/model.source", f"{text}: {hint}")]
    if used:
        text = f"got {source!r}, and {' and '.join(used)} for a function; expected one, such as 'my_pkg.nets:build'"
        return [("/model.source", text)]
    known = Slot(str, (_TASKS,)).expected()
    return [("/model.task", f"is missing; expected {known}; a source such as 'my_pkg.nets:build' needs none")]


def _default(section: type[Section], name: str) -> Any:
    return section.model_fields[name].default
