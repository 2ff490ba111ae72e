"""The task ``depth-estimation``: the distance at each pixel, scored by rank correlation with measured distances.

Shapes: N samples, B samples in a batch, h and w the height and width of the output, H and W those of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.examples import Depths, Example, Image
from quantizer.tasks.image_inputs import ImageInputs, read_depths, read_size
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.segmentation import at_size
from quantizer.tasks.task import CountedTask, Predictions, examples_of_kind, tasks


@tasks.add("depth-estimation")
class DepthEstimation(CountedTask):
    """Images to distances [N x h x w], scored by the mean absolute Spearman correlation with measured ones.

    Most models predict distances up to a factor and an offset, some of them the inverse. Ranks need no fit of these.
    Measured distances are resized to the output by their nearest value.
    """

    name = "depth-estimation"
    reads = "image"
    auto_class = "AutoModelForDepthEstimation"
    pipeline_class = "DepthEstimationPipeline"
    output_name = "predicted_depth"
    metric_name = "rank_correlation"
    packages = ("scipy",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        inputs = ImageInputs(model, processor)
        self._processor = inputs.processor
        return inputs

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        # Labelled images may calibrate.
        others = [example for example in examples if not isinstance(example, Image)]
        examples_of_kind(others, Depths, self.name)
        return [example.path for example in examples if isinstance(example, Image | Depths)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the files with the distances of samples [N]; they are read one by one, to save memory."""
        for option in ("do_center_crop", "do_pad"):
            if getattr(self._processor, option, False):
                raise TaskError(
                    f"{type(self._processor).__name__} has {option}, so its pixels do not match the measured "
                    f"distances; "
                    "disable it in preprocessor_config.json, or remove the samples to be scored"
                )
        files = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Depths, self.name)):
            _measured(example)
            files[at] = example.depths
        return files

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() != 3:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected distances [batch, height, width]"
            )
        return output.float()

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the distances unchanged."""
        return outputs

    def counts(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the absolute correlation of each sample, and 1 [N x 2]."""
        spearman = import_module("scipy.stats").spearmanr
        correlations = []
        for predicted, example in zip(
            predictions.decisions, examples_of_kind(examples, Depths, self.name), strict=True
        ):
            true = at_size(_measured(example), predicted.shape)
            measured = np.isfinite(true)
            flat = len(np.unique(true[measured])) < 2 or len(np.unique(predicted[measured])) < 2
            # Constant distances have no order.
            correlations.append(
                (0.0 if flat else abs(float(spearman(predicted[measured], true[measured]).statistic)), 1.0)
            )
        return np.array(correlations, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over samples."""
        return np.asarray(sums[..., 0] / sums[..., 1])

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the summed absolute difference to the float model's distances, relative to their sum."""
        reference, distances = float_predictions.decisions, other.decisions
        return {
            "relative_change": float(
                np.abs(distances - reference).sum() / max(np.abs(reference).sum(), np.finfo(float).tiny)
            )
        }


def _measured(example: Depths) -> npt.NDArray[np.float64]:
    (width, height), depths = read_size(example.path), read_depths(example.depths)
    if depths.shape != (height, width):
        raise TaskError(
            f"{example.depths} has {depths.shape[1]} x {depths.shape[0]} distances, and its image has {width} x "
            f"{height} "
            "pixels: expected a distance for each pixel"
        )
    if not np.isfinite(depths).any():
        raise TaskError(f"{example.depths} has no distance other than 0 and NaN: remove {example.path} from the data")
    return depths
