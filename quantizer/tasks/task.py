"""Tasks, and the check that rows are of the kind that one needs.

Shapes: N rows, B samples in a batch, S tokens, D width of an embedding, C classes.

Shapes: N rows, R resamples, K counts of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import MissingDependencyError, TaskError
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.metrics import bootstrap_interval, resampled_scores
from quantizer.tasks.outputs import dealt, first_output, of_all_ranks, stacked
from quantizer.utils.registry import TASKS, Registry, named_in_errors
from quantizer.utils.sizes import DataSizes

Kind = TypeVar("Kind")
DATASETS = {
    "Audio": "'audio-folder', 'audio-csv', 'hf'",
    "Boxes": "'coco-json'",
    "Choices": "'choices-jsonl', 'hf'",
    "Depths": "'image-depths'",
    "Image": "'image-folder', 'image-csv', 'hf'",
    "Masked": "'image-masks'",
    "Pair": "'stsb-csv', 'hf'",
    "Plain": "'text-lines', 'hf'",
    "Question": "'squad-json', 'hf'",
    "Rewritten": "'text-pairs', 'hf'",
    "Speech": "'transcripts', 'hf'",
    "Text": "'sst2-text', 'text-csv', 'vader', 'hf'",
    "Words": "'conll', 'hf'",
}


def rows_of_kind(rows: Sequence[Row], kind: type[Kind], task: str) -> list[Kind]:
    """Return the rows as a list of one kind."""
    checked: list[Kind] = []
    for row in rows:
        if not isinstance(row, kind):
            raise TaskError(
                f"task {task!r} needs rows of kind {kind.__name__}, got {type(row).__name__}: use a data set of such "
                f"rows, like {DATASETS[kind.__name__]}"
            )
        checked.append(row)
    return checked


Run: TypeAlias = Callable[[Batch], object]
"""One call of a model, proxy or engine: takes a batch, returns a ``ModelOutput``, mapping, tuple or tensor."""
Progress: TypeAlias = Callable[[int, int], None]
"""Called after each batch with (batches done, batches in all)."""


# By identity, so that what is computed of predictions can be kept beside them: arrays have no hash.
@dataclass(frozen=True, eq=False)
class Predictions:
    """The outputs of one model for some rows.

    Attributes:
        outputs: embeddings [N x D], or logits [N x C]; for pairs [2N x D], each row's two texts one after the other;
            where rows have tokens, [N x S x ...] with NaN after the last token of a row.
        decisions: one per row [N]: the cosine of a pair (float64), or a label (int64); or one per token [N x S], with
            -1 after the last.
    """

    outputs: npt.NDArray[np.float32]
    decisions: npt.NDArray[Any]


class Task(ABC):
    """The use of a model: from the rows of a data set to decisions and a score.

    A subclass names its model class, output and metric, and defines how rows become samples, how a batch's output
    becomes rows of ``Predictions.outputs``, and which decisions follow from them.

    Args:
        model: the float model, from which inputs are derived; an image model is run once. No reference is kept.
        processor: a transformers tokenizer, an image processor if the task reads images, a feature extractor if it
            reads recordings, or a processor that has both an extractor and a tokenizer.
        max_length: longer texts are cut to this many tokens.
        batch_size: samples in a batch (a pair is two).
        min_length: shorter batches are padded to this many tokens, for engines that have a lower limit.
        seconds: the length to which recordings are cut or filled; None: that of the feature extractor, or 10.

    Raises:
        TaskError: the lengths or the batch size are out of bounds, or the model does not fit the task.
        MissingDependencyError: a package that the score needs is not installed.
    """

    name: ClassVar[str]
    reads: ClassVar[Literal["text", "image", "audio"]] = "text"
    """The kind of samples; lengths apply to texts only."""
    auto_class: ClassVar[str]
    """The transformers class that loads the model."""
    output_name: ClassVar[str]
    metric_name: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()
    """The modules that the score needs besides NumPy, all in the extra ``hf``."""
    labels: ClassVar[Literal["row", "part"] | None] = None
    """What the class names in the model's config are for: a whole row, its tokens or pixels, or nothing."""
    gives_vocabulary: ClassVar[bool] = False
    """Whether the output has a value for each token of the vocabulary at each place, which makes it large."""
    names_labels: ClassVar[bool] = False
    """Whether the labels are those of the request, and not the model's own."""
    takes_text_tower: ClassVar[bool] = False
    """Whether it takes the text tower of a model of images and texts, too."""
    in_parts: ClassVar[bool] = False
    """Whether a model becomes several engines, which write text together."""
    split = False
    """Whether processes give ``predict`` the same rows, and each runs its part of the batches."""
    needs_head: ClassVar[bool] = False
    """Whether ``fit_head`` must be called before ``predict``."""

    def __init__(
        self,
        model: torch.nn.Module,
        processor: Any,
        *,
        max_length: int = 128,
        batch_size: int = 32,
        min_length: int = 1,
        seconds: float | None = None,
    ) -> None:
        if batch_size < 1:
            raise TaskError(f"batch_size={batch_size}, expected at least 1")
        for package in self.packages:
            if find_spec(package) is None:
                raise MissingDependencyError(package, "hf")
        self.seconds = seconds
        self.inputs: Inputs = self.make_inputs(model, processor, max_length, min_length)
        self.batch_size = batch_size

    # What a subclass defines

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        """Return what an engine computes of a checkpoint's model: all of it, unless a subclass says otherwise.

        Args:
            model: the model of ``auto_class``.
            tokenizer: its tokenizer; None unless ``names_labels``.
            texts: the text of each label that the request names; None unless ``names_labels``.

        Raises:
            TaskError: the model does not fit.
        """
        return model

    @abstractmethod
    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        """Return the samples of rows, in the order of ``Predictions.outputs``.

        Raises:
            TaskError: a row is of another kind.
        """

    @abstractmethod
    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the targets [N] that decisions are compared with."""

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return a batch's rows of ``Predictions.outputs`` [B x ...] from the model's output."""
        raise NotImplementedError(f"{type(self).__name__} defines neither represent() nor collect()")

    @abstractmethod
    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the decisions [N] for all outputs."""

    @abstractmethod
    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score over the last axis of [N] or [R x N]; see ``quantizer.tasks.metrics.Metric``."""

    @abstractmethod
    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return figures that compare a model with the float model on the same rows, by name."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        """Return the object that makes batches: of texts, unless a subclass reads something else."""
        return TextInputs(model, processor, max_length=max_length, min_length=min_length)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return a batch's rows of ``Predictions.outputs``, each by itself, from all that the model gave.

        A task of several outputs, or of rows that differ in length, defines this one and not ``represent``.
        """
        return list(self.represent(first_output(result, self.output_name), batch))

    def answer(self, run: Run, batch: Batch) -> Sequence[torch.Tensor]:
        """Return a batch's rows of ``Predictions.outputs``; a task whose model is called more than once defines it."""
        return self.collect(run(batch), batch)

    # What all tasks share

    def batches(self, rows: Sequence[Row], limit: int | None = None) -> list[Batch]:
        """Return rows as batches, in their own order; a batch of texts [B x S] is padded to its longest.

        Args:
            rows: rows of the kind that the task needs.
            limit: at most this many batches.
        """
        return self.sample_batches(self._samples(rows), limit)

    def sample_batches(self, samples: Sequence[Sample], limit: int | None = None) -> list[Batch]:
        """Return samples as batches, like ``batches``; they need not come from a data set."""
        starts = range(0, len(samples), self.batch_size)[:limit]
        return [self.inputs.batch(samples[start : start + self.batch_size]) for start in starts]

    def all_samples(self, mixed: Sequence[Row | Sample]) -> list[Sample]:
        """Return the samples of rows, after those values that are samples already.

        Raises:
            TaskError: a row is of another kind.
        """
        given = [one for one in mixed if isinstance(one, str | Path | tuple)]
        return given + self.samples([one for one in mixed if not isinstance(one, str | Path | tuple)])

    def predict(self, run: Run, rows: Sequence[Row], progress: Progress | None = None) -> Predictions:
        """Return the outputs and decisions of a model for all rows, in the order of the rows.

        Texts of similar length share a batch, which saves padding. Gradients are not recorded, and the model's mode
        does not change.

        Raises:
            TaskError: a row is of another kind, an output has a wrong shape or is not finite, or the head is missing.
        """
        return self.predictions(self.outputs(run, rows, progress))

    def predictions(self, outputs: npt.NDArray[np.float32]) -> Predictions:
        """Return ``Predictions`` of outputs that are computed already."""
        decisions = self.decide(outputs)
        if not isinstance(decisions, np.ndarray):
            raise TaskError(f"task {self.name!r}: decide() returned {_kind(decisions)}; expected an array [N]")
        return Predictions(outputs, decisions)

    def outputs(self, run: Run, rows: Sequence[Row], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Return ``Predictions.outputs`` for all rows; see ``predict``."""
        samples = self._samples(rows)
        order = self.inputs.order(samples)
        chunks = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        collected: dict[int, torch.Tensor] = {}
        for done, chunk in dealt(chunks) if self.split else enumerate(chunks, start=1):
            batch = self.inputs.batch([samples[at] for at in chunk])
            with torch.no_grad():
                result = self.answer(run, batch)
            if len(result) != len(chunk):
                raise TaskError(
                    f"the model gave {len(result)} outputs for a batch of {len(chunk)} {self.reads}s, as task "
                    f"{self.name!r} reads them"
                )
            if not all(bool(torch.isfinite(row).all()) for row in result):
                raise TaskError(
                    f"the model's {self.output_name!r} holds NaN or infinite values for batch {done} of {len(chunks)}: "
                    f"the model or engine is broken, or its type cannot hold the values"
                )
            collected.update(zip(chunk, result, strict=True))
            if progress is not None:
                progress(done, len(chunks))
        whole = of_all_ranks(collected) if self.split else collected
        return stacked([whole[at].numpy() for at in range(len(samples))])

    def fit_head(self, run_float: Run, rows: Sequence[Row], progress: Progress | None = None) -> None:
        """Fit the head that turns embeddings into labels; a task without one raises ``TaskError``."""
        raise TaskError(f"task {self.name!r} has no head to fit: leave out the rows for it")

    def score(self, predictions: Predictions, rows: Sequence[Row]) -> float:
        """Return the task's metric for predictions on ``rows``."""
        value = self.metric(*self.judged(predictions, rows))
        if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            raise TaskError(f"task {self.name!r}: metric() returned {_kind(value)}; expected one number for arrays [N]")
        return float(value)

    def difference_interval(
        self, float_predictions: Predictions, other: Predictions, rows: Sequence[Row], n: int = 1000, seed: int = 0
    ) -> tuple[float, float]:
        """Return the 95% bootstrap interval of ``score(other) - score(float)``, rows resampled in pairs."""
        reference, targets = self.judged(float_predictions, rows)
        return bootstrap_interval(self.metric, reference, self.judged(other, rows)[0], targets, n, seed)

    def resampled(
        self, predictions: Predictions, rows: Sequence[Row], n: int = 1000, seed: int = 0
    ) -> tuple[float, ...]:
        """Return the scores of bootstrap resamples, which are the same for all predictions on the same rows."""
        return tuple(map(float, resampled_scores(self.metric, *self.judged(predictions, rows), n, seed)))

    def judged(self, predictions: Predictions, rows: Sequence[Row]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what ``metric`` takes: for each row, what was decided and what is right.

        Raises:
            TaskError: the predictions are of other samples.
        """
        require_rows(predictions, rows)
        targets = self.targets(rows)
        if len(targets) != len(rows):
            raise TaskError(f"task {self.name!r}: targets() returned {len(targets)} for {len(rows)} rows")
        return predictions.decisions, targets

    @property
    def sizes(self) -> DataSizes | None:
        """None: the open axes are those that the inputs of a task have."""
        return None

    @property
    def rows_apart(self) -> bool:
        """True: a model of a task computes each row of a batch for itself."""
        return True

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs in every batch, in the processor's order."""
        return self.inputs.names

    def example(self, rows: Sequence[Row] | None = None) -> Batch:
        """Return a small batch for export: two images, or two texts [2 x S] with S at least 16 if ``max_length`` is.

        Args:
            rows: the rows to take it from; None: random values, for texts with padding in the second row.
        """
        return self.inputs.example(self._samples(rows) if rows else [])

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return random ordinary tokens [batch x sequence] with nothing masked, or random images, to measure latency.

        Raises:
            TaskError: for texts, ``sequence`` is missing or above the model's positions.
        """
        return self.inputs.random(batch, sequence, seed)

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return a batch of that size on which an engine's outputs are compared with PyTorch's."""
        return self.inputs.filled(samples, batch, sequence)

    def _samples(self, rows: Sequence[Row]) -> list[Sample]:
        if not rows:
            raise TaskError(f"task {self.name!r} was given no rows, expected at least one")
        return self.all_samples(rows)


def require_rows(predictions: Predictions, rows: Sequence[Row]) -> None:
    """Raise ``TaskError`` if there are more or fewer predictions than rows."""
    if len(rows) != len(predictions.decisions):
        raise TaskError(f"{len(predictions.decisions)} predictions but {len(rows)} rows: pass the rows predicted on")


def _kind(value: object) -> str:
    return (
        f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else f"an object of {type(value).__name__}"
    )


tasks: Registry[type[Task]] = TASKS


def build_task(
    name: str,
    model: torch.nn.Module,
    processor: Any,
    *,
    max_length: int = 128,
    batch_size: int = 32,
    min_length: int = 1,
    seconds: float | None = None,
) -> Task:
    """Return a task by its registered name; see ``Task`` for the arguments.

    Raises:
        ConfigError: no task has this name.
        TaskError: the lengths or the batch size are out of bounds, or the model does not fit the task.
    """
    with named_in_errors(f"task {name!r}"):
        return tasks[name](
            model, processor, max_length=max_length, batch_size=batch_size, min_length=min_length, seconds=seconds
        )


class JudgedTask(Task):
    """A task that judges each row, and scores what came of that.

    What is slow, such as finding entities or matching boxes, is done once a row, and once for a score, its differences
    and its intervals.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._known: WeakKeyDictionary[Predictions, tuple[list[Row], npt.NDArray[Any]]] = WeakKeyDictionary()

    @abstractmethod
    def judge(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return what ``metric`` takes of each row [N x ...]."""

    def judged(self, predictions: Predictions, rows: Sequence[Row]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what came of each row [N x ...], twice: it holds what is right already."""
        require_rows(predictions, rows)
        known = self._known.get(predictions)
        if known is None or known[0] != list(rows):
            known = (list(rows), self.judge(predictions, rows))
            self._known[predictions] = known
        return known[1], known[1]


class CountedTask(JudgedTask):
    """A task that counts in each row, and scores the sums of its counts: entity F1, perplexity, mean IoU."""

    @abstractmethod
    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return what is counted in each row [N x K]."""

    @abstractmethod
    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores [...] of sums of counts [... x K]."""

    def judge(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[Any]:
        return self.counts(predictions, rows)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score of counts [N x K], or those of resamples [R x N x K]."""
        return self.ratio(decisions.sum(axis=-2))
