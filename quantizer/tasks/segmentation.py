"""The task ``semantic-segmentation``, and values of each place of an image at another size.

Shapes: H and W the height and width that there are, h and w those that are wanted.

Shapes: N rows, B rows of a batch, C classes, h and w the height and width of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names
from quantizer.tasks.datasets.rows import Masked, Row
from quantizer.tasks.image_inputs import ImageInputs, read_image, read_mask
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import label_flips
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks


def at_size(values: npt.NDArray[Any], size: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return values [H x W] at a size [h x w], each place by the nearest one."""
    given = torch.from_numpy(values)[None, None].double()
    # "nearest" takes the place at the upper left, as the resizing of most models does not.
    found = torch.nn.functional.interpolate(given, size=size, mode="nearest-exact")
    return np.asarray(found[0, 0].numpy())


_IGNORED = 255
"""The class of places that count nowhere, in masks and in image processors of transformers."""


@tasks.add("semantic-segmentation")
class SemanticSegmentation(CountedTask):
    """Images to the class of each place [N x h x w], scored by mean intersection over union (mIoU).

    The score is taken at the size of the logits: a mask is brought there as the image is, by the image processor, and
    then by the nearest of its places. It differs from scores at the size of the images, and does so alike for all.
    """

    name = "semantic-segmentation"
    reads = "image"
    auto_class = "AutoModelForSemanticSegmentation"
    output_name = "logits"
    labels = "part"
    metric_name = "mean_iou"

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._classes = len(class_names(getattr(model, "config", None)))
        self._processor = processor
        return ImageInputs(model, processor)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Masked, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the masks of rows [N], each [H x W] at the size of the processed image."""
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Masked, self.name)):
            found[at] = self._mask(row)
        return found

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() != 4:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected logits [batch, classes, height, "
                "width]: does it tell a class for each place?"
            )
        return output.argmax(dim=1).float()

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return outputs.astype(np.int64)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return for each class the places that are said and true, and those that are either [N x 2C]."""
        found = []
        for said, mask in zip(predictions.decisions, self.targets(rows), strict=True):
            true = at_size(mask, said.shape).astype(np.int64)
            pairs = self._classes * true[true != _IGNORED] + said[true != _IGNORED]
            both = np.bincount(pairs, minlength=self._classes**2).reshape(self._classes, self._classes)
            right = np.diag(both)
            found.append(np.concatenate([right, both.sum(axis=0) + both.sum(axis=1) - right]))
        return np.array(found, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over the classes that are said or true somewhere; 0 if there are none."""
        right, either = sums[..., : self._classes], sums[..., self._classes :]
        there = either > 0
        shares = np.divide(right, either, out=np.zeros_like(right), where=there)
        return np.asarray(shares.sum(axis=-1) / np.maximum(there.sum(axis=-1), 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of places whose class differs."""
        return {"label_flips": label_flips(float_predictions.decisions, other.decisions)}

    def _mask(self, row: Masked) -> npt.NDArray[np.int64]:
        image, mask = read_image(row.path), read_mask(row.mask)
        if mask.shape != (image.height, image.width):
            raise TaskError(
                f"{row.mask} has {mask.shape[1]} x {mask.shape[0]} pixels, its image {image.width} x {image.height}: "
                "expected a class number for each pixel"
            )
        try:
            made = self._processor(image, segmentation_maps=mask, return_tensors="np")["labels"][0]
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(
                f"{type(self._processor).__name__} brings no masks to the size of its images ({error}): score this "
                "model with a metric of your own, by Quantizer"
            ) from error
        classes = np.asarray(made).astype(np.int64)
        highest = int(classes[classes != _IGNORED].max(initial=0))
        if highest >= self._classes:
            raise TaskError(
                f"{row.mask} holds class {highest}, but the model has {self._classes} classes (0 to "
                f"{self._classes - 1}; {_IGNORED} counts nowhere)"
            )
        return classes
