"""The task ``semantic-segmentation``: the class of each pixel, scored by mean intersection over union (mIoU).

Shapes: N samples, B samples in a batch, C classes, h and w the height and width of the logits, H and W those of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names
from quantizer.tasks.datasets.examples import Example, Masked
from quantizer.tasks.image_inputs import ImageInputs, read_image, read_mask
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.metrics import label_flips
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks


def at_size(values: npt.NDArray[Any], size: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return values [H x W] resized to [h x w] by their nearest value."""
    tensor = torch.from_numpy(values)[None, None].double()
    # "nearest" would take the upper left value, unlike the resizing of most models.
    resized = torch.nn.functional.interpolate(tensor, size=size, mode="nearest-exact")
    return np.asarray(resized[0, 0].numpy())


_IGNORED = 255
"""The class of ignored pixels, in masks and in image processors of transformers."""


@tasks.add("semantic-segmentation")
class SemanticSegmentation(CountedTask):
    """Images to the class of each pixel [N x h x w], scored by mean intersection over union (mIoU).

    The score is computed at the size of the logits: the image processor resizes a mask like its image, and the nearest
    value is taken. It differs from scores at the size of the images, equally for all models.
    """

    name = "semantic-segmentation"
    reads = "image"
    auto_class = "AutoModelForSemanticSegmentation"
    pipeline_class = "ImageSegmentationPipeline"
    pipeline_options: ClassVar[Mapping[str, Any]] = {"subtask": "semantic"}
    output_name = "logits"
    labels = "part"
    metric_name = "mean_iou"

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._classes = len(class_names(getattr(model, "config", None)))
        inputs = ImageInputs(model, processor)
        self._processor = inputs.processor
        return inputs

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, Masked, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the masks of samples [N], each [H x W] at the size of the processed image."""
        masks = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Masked, self.name)):
            masks[at] = self._mask(example)
        return masks

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() != 4:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected logits [batch, classes, height, "
                "width]: does it predict a class for each pixel?"
            )
        return output.argmax(dim=1).float()

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return outputs.astype(np.int64)

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the pixels in the intersection and in the union of each class [N x 2C]."""
        counts = []
        for predicted, mask in zip(predictions.decisions, self.targets(examples), strict=True):
            true = at_size(mask, predicted.shape).astype(np.int64)
            pairs = self._classes * true[true != _IGNORED] + predicted[true != _IGNORED]
            both = np.bincount(pairs, minlength=self._classes**2).reshape(self._classes, self._classes)
            right = np.diag(both)
            counts.append(np.concatenate([right, both.sum(axis=0) + both.sum(axis=1) - right]))
        return np.array(counts, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean IoU over all classes predicted or true somewhere; 0 without any."""
        right, either = sums[..., : self._classes], sums[..., self._classes :]
        present = either > 0
        shares = np.divide(right, either, out=np.zeros_like(right), where=present)
        return np.asarray(shares.sum(axis=-1) / np.maximum(present.sum(axis=-1), 1))

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of pixels whose class differs."""
        return {"label_flips": label_flips(float_predictions.decisions, other.decisions)}

    def _mask(self, example: Masked) -> npt.NDArray[np.int64]:
        image, mask = read_image(example.path), read_mask(example.mask)
        if mask.shape != (image.height, image.width):
            raise TaskError(
                f"{example.mask} has {mask.shape[1]} x {mask.shape[0]} pixels, and its image has "
                f"{image.width} x {image.height}: expected a class number for each pixel"
            )
        try:
            resized = self._processor(image, segmentation_maps=mask, return_tensors="np")["labels"][0]
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(
                f"{type(self._processor).__name__} cannot resize masks ({error}): quantize this model with Quantizer, "
                "and score it with your own metric"
            ) from error
        classes = np.asarray(resized).astype(np.int64)
        highest = int(classes[classes != _IGNORED].max(initial=0))
        if highest >= self._classes:
            raise TaskError(
                f"{example.mask} holds class {highest}, but the model has {self._classes} classes (0 to "
                f"{self._classes - 1}; {_IGNORED} is ignored)"
            )
        return classes
