"""``Task``, the base class of tasks: from the examples of a data set to a model's decisions and their score.

``JudgedTask`` is for scores with a slow comparison per sample, ``CountedTask`` for ratios of sums, such as F1.

Shapes: N samples, B samples in a batch, S tokens, D width of an embedding, C classes, R resamples, K counts of a
sample.
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
from quantizer.tasks.datasets.examples import Example
from quantizer.tasks.inputs import Batch, Inputs, Sample, TextInputs
from quantizer.tasks.metrics import bootstrap_interval, resampled_scores
from quantizer.tasks.outputs import dealt, first_output, of_all_ranks, stacked
from quantizer.utils.registry import TASKS, Registry, named_in_errors
from quantizer.utils.sizes import SEQUENCE, Axes, DataSizes

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
    "Query": "'beir', 'trec'",
    "Question": "'squad-json', 'hf'",
    "Rewritten": "'text-pairs', 'hf'",
    "Speech": "'transcripts', 'hf'",
    "Text": "'sst2-text', 'text-csv', 'vader', 'hf'",
    "Words": "'conll', 'hf'",
}


def examples_of_kind(examples: Sequence[Example], kind: type[Kind], task: str) -> list[Kind]:
    """Return examples as a list of one kind; raise ``TaskError`` for any other kind."""
    checked: list[Kind] = []
    for example in examples:
        if not isinstance(example, kind):
            raise TaskError(
                f"task {task!r} needs samples of kind {kind.__name__}, got {type(example).__name__}: use a data set of "
                f"such samples, like {DATASETS[kind.__name__]}, or set the task of your data"
            )
        checked.append(example)
    return checked


Run: TypeAlias = Callable[[Batch], object]
"""One call of a model, proxy or engine: takes a batch, returns a ``ModelOutput``, mapping, tuple or tensor."""
Progress: TypeAlias = Callable[[int, int], None]
"""Called after each batch with (batches done, batches in all)."""


# eq=False: hashed by identity, as keys of caches.
@dataclass(frozen=True, eq=False)
class Predictions:
    """Outputs and decisions of one model for N samples.

    Attributes:
        outputs: embeddings [N x D], or logits [N x C]; for pairs [2N x D], both texts of a pair one after the other;
            for queries [N + M x D], M documents after them; for tokens [N x S x ...], padded with NaN.
        decisions: one per sample [N]: the cosine of a pair (float64), or a label (int64); or one per token [N x S],
            padded with -1; or the scores of a ranking [N x 2].
    """

    outputs: npt.NDArray[np.float32]
    decisions: npt.NDArray[Any]


class Task(ABC):
    """The use of a model: from the examples of a data set to decisions and a score.

    A subclass names its model class, output and metric. It defines how examples become model inputs, how a batch's
    output becomes ``Predictions.outputs``, and which decisions follow from them.

    Args:
        model: the float model, from which inputs are derived; an image model is run once. No reference is kept.
        processor: a transformers tokenizer, an image processor if the task reads images, a feature extractor if it
            reads recordings, or a processor that has both an extractor and a tokenizer.
        max_length: longer texts are cut to this many tokens.
        batch_size: samples in a batch; a pair counts as two.
        min_length: shorter batches are padded to this many tokens of a text or values of a recording, for engines with
            a lower limit.
        seconds: the length to which recordings are cut; None: that of the feature extractor, or 10.

    Raises:
        TaskError: the lengths or the batch size are out of bounds, or the model does not fit the task.
        MissingDependencyError: a package that the score needs is not installed.
    """

    name: ClassVar[str]
    reads: ClassVar[Literal["text", "image", "audio"]] = "text"
    """The kind of samples; lengths apply to texts only."""
    auto_class: ClassVar[str]
    """The transformers class that loads the model."""
    pipeline_class: ClassVar[str | None] = None
    """The transformers pipeline that makes inputs, and results from outputs; None without one."""
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """The default options of this pipeline."""
    output_name: ClassVar[str]
    """The output that the task reads; files contain it and ``further_outputs`` alone."""
    further_outputs: ClassVar[tuple[str, ...]] = ()
    """Names of further outputs that ``collect`` reads."""
    metric_name: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that the score imports, all in the extra ``hf``."""
    labels: ClassVar[Literal["example", "part"] | None] = None
    """The unit that gets a class of the model's config: an example, its tokens or pixels (part), or None."""
    gives_vocabulary: ClassVar[bool] = False
    """Whether the output has one value per token of the vocabulary and position, which makes it large."""
    names_labels: ClassVar[bool] = False
    """Whether the configuration names the labels, instead of the model."""
    takes_text_tower: ClassVar[bool] = False
    """Whether the text tower of a model of images and texts also fits."""
    asymmetric: ClassVar[bool] = False
    """Whether queries and documents have prompts of their own."""
    in_parts: ClassVar[bool] = False
    """Whether a model becomes several engines that generate text together."""
    split = False
    """Whether several processes share the batches of ``predict``."""
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

    # Methods that a subclass defines

    @classmethod
    def module_of(
        cls, model: torch.nn.Module, tokenizer: Any = None, texts: Mapping[str, str] | None = None
    ) -> torch.nn.Module:
        """Return the module that an engine computes: the whole model of a checkpoint, unless a subclass overrides it.

        Args:
            model: the model of ``auto_class``.
            tokenizer: its tokenizer; None unless ``names_labels``.
            texts: the text of each label in the configuration; None unless ``names_labels``.

        Raises:
            TaskError: the model does not fit.
        """
        return model

    @abstractmethod
    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        """Return the model inputs of examples, in the order of ``Predictions.outputs``.

        Raises:
            TaskError: an example is of another kind.
        """

    @abstractmethod
    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the targets [N] that decisions are compared with."""

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the entries of ``Predictions.outputs`` [B x ...] for a batch, from the named output."""
        raise NotImplementedError(f"{type(self).__name__} defines neither represent() nor collect()")

    @abstractmethod
    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the decisions [N] for all outputs."""

    @abstractmethod
    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score over the last axis of [N] or [R x N]; see ``quantizer.tasks.metrics.Metric``."""

    @abstractmethod
    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return figures, by name, that compare a model with the float model on the same samples."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        """Return the object that makes batches; the default makes batches of texts."""
        return TextInputs(model, processor, max_length=max_length, min_length=min_length)

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the entries of ``Predictions.outputs`` for a batch, one tensor per sample, from all outputs.

        Override this instead of ``represent`` if the task has several outputs, or samples of different lengths.
        """
        return list(self.represent(first_output(result, self.output_name), batch))

    def answer(self, run: Run, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the entries of ``Predictions.outputs`` for a batch; override it to call the model several times."""
        return self.collect(run(batch), batch)

    # Methods that all tasks share

    def batches(self, examples: Sequence[Example], limit: int | None = None) -> list[Batch]:
        """Return examples as batches; a batch of texts [B x S] or of recordings is padded to its longest.

        Recordings of similar length share a batch. Other examples keep their order.

        Args:
            examples: examples of the kind that the task needs.
            limit: the most batches.
        """
        return self.sample_batches(self._samples(examples), limit)

    def sample_batches(self, samples: Sequence[Sample], limit: int | None = None) -> list[Batch]:
        """Return model inputs as batches, like ``batches``."""
        # Recordings may have padding without a mask, which would be calibrated.
        order = range(len(samples)) if self.sizes is None else self.inputs.order(samples)
        chunks = [order[start : start + self.batch_size] for start in range(0, len(samples), self.batch_size)]
        # In the order of their first samples, so that the first batches are not the shortest ones.
        return [self.inputs.batch([samples[at] for at in chunk]) for chunk in sorted(chunks, key=min)[:limit]]

    def all_samples(self, mixed: Sequence[Example | Sample]) -> list[Sample]:
        """Return the model inputs of texts and paths, then of examples.

        Raises:
            TaskError: an example is of another kind.
        """
        samples = [entry for entry in mixed if isinstance(entry, str | Path | tuple)]
        return samples + self.samples([entry for entry in mixed if not isinstance(entry, str | Path | tuple)])

    def predict(self, run: Run, examples: Sequence[Example], progress: Progress | None = None) -> Predictions:
        """Return the outputs and decisions of a model for all examples, in their order.

        Texts of similar length share a batch, which saves padding. Gradients are not recorded, and the model's mode
        does not change.

        Raises:
            TaskError: an example is of another kind, an output has a wrong shape or is not finite, or the head is
                missing.
        """
        return self.predictions(self.outputs(run, examples, progress))

    def predictions(self, outputs: npt.NDArray[np.float32]) -> Predictions:
        """Return ``Predictions`` from computed outputs."""
        decisions = self.decide(outputs)
        if not isinstance(decisions, np.ndarray):
            raise TaskError(f"task {self.name!r}: decide() returned {_kind(decisions)}; expected an array [N]")
        return Predictions(outputs, decisions)

    def outputs(
        self, run: Run, examples: Sequence[Example], progress: Progress | None = None
    ) -> npt.NDArray[np.float32]:
        """Return ``Predictions.outputs`` for all examples; see ``predict``."""
        samples = self._samples(examples)
        order = self.inputs.order(samples)
        chunks = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        collected: dict[int, torch.Tensor] = {}
        for done, chunk in dealt(chunks) if self.split else enumerate(chunks, start=1):
            batch = self.inputs.batch([samples[at] for at in chunk])
            with torch.no_grad():
                result = self.answer(run, batch)
            if len(result) != len(chunk):
                raise TaskError(
                    f"the model returned {len(result)} outputs for a batch of {len(chunk)} {self.reads}s in "
                    f"task {self.name!r}; expected one each"
                )
            if not all(bool(torch.isfinite(output).all()) for output in result):
                raise TaskError(
                    f"the model's {self.output_name!r} holds NaN or infinite values for batch {done} of {len(chunks)}: "
                    f"the model or engine is broken, or its data type overflows"
                )
            collected.update(zip(chunk, result, strict=True))
            if progress is not None:
                progress(done, len(chunks))
        outputs = of_all_ranks(collected) if self.split else collected
        return stacked([outputs[at].numpy() for at in range(len(samples))])

    def fit_head(self, run_float: Run, examples: Sequence[Example], progress: Progress | None = None) -> None:
        """Fit the head that turns embeddings into labels; a task without a head raises ``TaskError``."""
        raise TaskError(f"task {self.name!r} has no head to fit: remove data.head")

    def score(self, predictions: Predictions, examples: Sequence[Example]) -> float:
        """Return the task's metric for predictions on ``examples``."""
        value = self.metric(*self.judged(predictions, examples))
        if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            raise TaskError(f"task {self.name!r}: metric() returned {_kind(value)}; expected one number for arrays [N]")
        return float(value)

    def difference_interval(
        self,
        float_predictions: Predictions,
        other: Predictions,
        examples: Sequence[Example],
        n: int = 1000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """Return the 95% bootstrap interval of ``score(other) - score(float)``, with samples resampled in pairs."""
        reference, targets = self.judged(float_predictions, examples)
        return bootstrap_interval(self.metric, reference, self.judged(other, examples)[0], targets, n, seed)

    def resampled(
        self, predictions: Predictions, examples: Sequence[Example], n: int = 1000, seed: int = 0
    ) -> tuple[float, ...]:
        """Return the scores of n bootstrap resamples; one seed draws the same samples for all predictions."""
        return tuple(map(float, resampled_scores(self.metric, *self.judged(predictions, examples), n, seed)))

    def judged(
        self, predictions: Predictions, examples: Sequence[Example]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the two arguments of ``metric``: the decision and the target of each sample.

        Raises:
            TaskError: the predictions are of other samples.
        """
        require_one_prediction_each(predictions, examples)
        targets = self.targets(examples)
        if len(targets) != len(examples):
            raise TaskError(f"task {self.name!r}: targets() returned {len(targets)} for {len(examples)} samples")
        return predictions.decisions, targets

    @property
    def in_data(self) -> DataSizes | None:
        """The axes that vary in the data; see ``Inputs``."""
        return self.inputs.in_data

    @property
    def sizes(self) -> DataSizes | None:
        """The dynamic axes of the inputs and their sizes; None: they follow from an example."""
        return self.inputs.sizes

    def keep_open(self, axes: Axes) -> None:
        """Keep only these axes dynamic; the model fixes the others."""
        self.inputs.keep_open(axes)

    @property
    def has_lengths(self) -> bool:
        """True if batches differ in length: those of texts, and of recordings whose length the model leaves open."""
        return self.reads == "text" or (self.sizes is not None and self.sizes.is_open(SEQUENCE))

    @property
    def samples_independent(self) -> bool:
        """True: the models of tasks compute each sample of a batch independently."""
        return True

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs in every batch, in the processor's order."""
        return self.inputs.names

    def example(self, examples: Sequence[Example] | None = None) -> Batch:
        """Return a batch of two samples for export; texts have 16 tokens or more if ``max_length`` allows it.

        Args:
            examples: the source of the samples; None: random values, for texts with padding in the second sample.
        """
        return self.inputs.example(self._samples(examples) if examples else [])

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return random ordinary tokens [batch x sequence] with nothing masked, or random images, to measure latency.

        Raises:
            TaskError: for texts, ``sequence`` is missing or above the model's positions.
        """
        return self.inputs.random(batch, sequence, seed)

    def compared(self, samples: Sequence[Any], batch: int, sequence: int | None) -> Batch:
        """Return a batch of the given size on which the outputs of an engine and of PyTorch are compared."""
        return self.inputs.filled(samples, batch, sequence)

    def _samples(self, examples: Sequence[Example]) -> list[Sample]:
        if not examples:
            raise TaskError(f"task {self.name!r} was given no samples, expected at least one")
        return self.all_samples(examples)


def require_one_prediction_each(predictions: Predictions, examples: Sequence[Example]) -> None:
    """Raise ``TaskError`` unless there is one prediction per example."""
    if len(examples) != len(predictions.decisions):
        raise TaskError(
            f"{len(predictions.decisions)} predictions but {len(examples)} samples: pass the samples predicted on"
        )


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
    """A task that compares each sample with its target once, and scores the stored results.

    A slow comparison, such as matching boxes, thus runs once for a score, its differences and its intervals.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: WeakKeyDictionary[Predictions, tuple[list[Example], npt.NDArray[Any]]] = WeakKeyDictionary()

    @abstractmethod
    def judge(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the result of each sample [N x ...], from which ``metric`` computes the score."""

    def judged(
        self, predictions: Predictions, examples: Sequence[Example]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the results of all samples [N x ...] as both decisions and targets; they include the targets."""
        require_one_prediction_each(predictions, examples)
        known = self._known.get(predictions)
        if known is None or known[0] != list(examples):
            known = (list(examples), self.judge(predictions, examples))
            self._known[predictions] = known
        return known[1], known[1]


class CountedTask(JudgedTask):
    """A task whose score is a ratio of sums of counts per sample: entity F1, perplexity, mean IoU."""

    @abstractmethod
    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the counts of each sample [N x K]."""

    @abstractmethod
    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the scores [...] of sums of counts [... x K]."""

    def judge(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[Any]:
        return self.counts(predictions, examples)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the score of counts [N x K], or of each resample of [R x N x K]."""
        return self.ratio(decisions.sum(axis=-2))
