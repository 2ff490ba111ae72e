"""Tasks of images that are converted and compared with the float model, and not scored: distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Image
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.tasks.inputs import Inputs
from quantizer.tasks.inputs import Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.task import Predictions
from quantizer.tasks.task import Task
from quantizer.tasks.task import tasks

__all__ = ["DepthEstimation", "UnscoredTask"]


class UnscoredTask(Task):
    """A task without a score: its engines are compared with the float model, output by output."""

    reads = "image"
    metric_name = "none"
    why: ClassVar[str]
    """Why there is no score, for the message."""

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        return ImageInputs(model, processor)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Image, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Raise ``TaskError``: nothing is scored."""
        raise self._unscored()

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Raise ``TaskError``: nothing is scored."""
        raise self._unscored()

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Raise ``TaskError``: nothing is scored."""
        raise self._unscored()

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Raise ``TaskError``: nothing is scored."""
        raise self._unscored()

    def _unscored(self) -> TaskError:
        return TaskError(
            f"task {self.name!r} has no score: {self.why}. Leave out the rows to be scored; every report compares the "
            "outputs with those of the float model; quantizer.quantize_model(model, data, score=fn) takes one of yours"
        )


@tasks.add("depth-estimation")
class DepthEstimation(UnscoredTask):
    """Images to a distance at each place [N x h x w]."""

    name = "depth-estimation"
    auto_class = "AutoModelForDepthEstimation"
    output_name = "predicted_depth"
    why = "most of these models tell distances up to a factor and an offset, which each benchmark fits in its own way"
