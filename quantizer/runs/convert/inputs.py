"""The inputs that the engines of all backends share, from the checkpoint and the request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quantizer.errors import TaskError
from quantizer.runs.convert.request import BATCH_SIZES, SEQUENCE_LENGTHS, ConversionRequest, Sizes, convertible_tasks
from quantizer.runs.outputs.check_batches import check_shapes
from quantizer.runs.written_sizes import WRITTEN_BATCH_SIZES
from quantizer.tasks import read_checkpoint, require_labels, tasks, text_files

_LARGEST_OUTPUT = 1 << 27
"""The most values of an output in the default sizes: half a gigabyte in float32, of which a check holds several."""

_CALIBRATION = {
    "text": f"a file of texts ({', '.join(text_files)})",
    "image": "a folder of images",
    "audio": "a folder of recordings (.wav)",
}
_SIZE = {
    "image": "images, which have no tokens; leave it out (their size is that which the model's image processor makes)",
    "audio": "recordings, which have no tokens; leave it out, and give --seconds",
}


@dataclass(frozen=True, kw_only=True)
class ConversionInputs:
    """The inputs that all backends share: the model, and the sizes that engines are built for.

    Attributes:
        name: the name of the output folder.
        source: the source of the model.
        labels: the class names of a classifier, of rows or of tokens; empty for other models.
        batch: least, usual and most rows in a batch.
        sequence: least, usual and most tokens of a row; None: rows are no texts.
        seconds: the length of recordings; None: their feature extractor's own.
    """

    name: str
    source: str
    task: str
    labels: tuple[str, ...]
    batch: Sizes
    sequence: Sizes | None
    seconds: float | None = None

    @property
    def dimensions(self) -> dict[str, Sizes]:
        """The sizes of each dynamic dimension, by its name in the ONNX file."""
        return {"batch": self.batch} if self.sequence is None else {"batch": self.batch, "sequence": self.sequence}

    @property
    def shapes(self) -> list[tuple[int, int | None]]:
        """The rows and tokens of the least, the usual and the largest shape, without repetitions."""
        return list(dict.fromkeys(zip(self.batch, self.sequence or (None, None, None), strict=True)))

    @property
    def checked_shapes(self) -> list[tuple[int, int]]:
        """The rows and tokens at which engines are compared: those of ``shapes``, and some between."""
        sequence = self.sequence or (1, 1, 1)
        between = check_shapes(self.batch, sequence, (self.batch[1], sequence[1]))
        return list(dict.fromkeys([*between, *zip(self.batch, sequence, strict=True)]))

    @property
    def usual(self) -> int:
        """The place of the usual shape in ``shapes``, which is that of the least one if they are equal."""
        return self.shapes.index((self.batch[1], None if self.sequence is None else self.sequence[1]))


def conversion_inputs(asked: ConversionRequest, name: str) -> ConversionInputs:
    """Return the inputs of all backends, from the checkpoint and the request."""
    checkpoint = read_checkpoint(asked.model, asked.task)
    task = asked.task or checkpoint.task
    if task not in convertible_tasks():
        raise TaskError(
            f"model source {asked.model!r}: its architecture is {checkpoint.architecture or 'not said'}, which does "
            f"not tell the task; give --task with one of {', '.join(convertible_tasks())}"
        )
    reads = tasks[task].reads
    if asked.calibration is not None and asked.calibration.holds not in (None, reads):
        raise TaskError(
            f"--calibration {asked.calibration} is of {asked.calibration.holds}s, and task {task} is for {reads}s: "
            f"give {_CALIBRATION[reads]}"
        )
    require_labels(task, asked.labels)
    labels = asked.labels or (checkpoint.labels if tasks[task].labels is not None else ())
    if asked.new_tokens is not None and not tasks[task].in_parts:
        raise TaskError(f"--new-tokens {asked.new_tokens}: task {task} writes no text; leave it out")
    usual = WRITTEN_BATCH_SIZES if tasks[task].in_parts else BATCH_SIZES
    facts = partial(ConversionInputs, name=name, source=asked.model, task=task, labels=labels)
    if asked.seconds is not None and reads != "audio":
        raise TaskError(f"--seconds {asked.seconds:g} is for recordings, and task {task} for {reads}s: leave it out")
    if reads != "text":
        if asked.seq_len is not None:
            raise TaskError(f"--seq-len {' '.join(map(str, asked.seq_len))}: task {task} is for {_SIZE[reads]}")
        return facts(batch=asked.batch_size or usual, sequence=None, seconds=asked.seconds)
    most = checkpoint.positions
    if asked.seq_len is not None and most is not None and asked.seq_len[2] > most:
        raise TaskError(
            f"--seq-len {' '.join(map(str, asked.seq_len))}: the model has {most} positions; lower the last number to "
            f"{most} or less"
        )
    sequence = asked.seq_len or _lowered(SEQUENCE_LENGTHS, most)
    values = sequence[2] * (checkpoint.vocabulary or 0) if tasks[task].gives_vocabulary else 0
    return facts(batch=asked.batch_size or _lowered(usual, _most_rows(values)), sequence=sequence)


def _most_rows(values: int) -> int | None:
    """Return the largest power of two of rows whose output is small enough, at least 1; None: any number is."""
    return None if values == 0 else 1 << max(_LARGEST_OUTPUT // values, 1).bit_length() - 1


def _lowered(sizes: Sizes, most: int | None) -> Sizes:
    least, usual, largest = (size if most is None else min(size, most) for size in sizes)
    return least, usual, largest
