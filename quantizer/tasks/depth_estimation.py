"""The task ``depth-estimation``: a distance at each place of an image, scored by the order of its places.

Shapes: N rows, B rows of a batch, h and w the height and width of the output, H and W those of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.datasets.rows import Depths, Image, Row
from quantizer.tasks.image_inputs import ImageInputs, read_depths, read_size
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.segmentation import at_size
from quantizer.tasks.task import CountedTask, Predictions, rows_of_kind, tasks


@tasks.add("depth-estimation")
class DepthEstimation(CountedTask):
    """Images to the distance at each place [N x h x w], scored by Spearman's correlation with the measured ones.

    It is taken image by image, its sign left out, and averaged. Most models tell distances up to a factor and an
    offset, some of them their inverse, and each benchmark fits these in its own way: the order of the places needs
    none of that. The measured distances are brought to the size of the output, each place by the nearest one.
    """

    name = "depth-estimation"
    reads = "image"
    auto_class = "AutoModelForDepthEstimation"
    output_name = "predicted_depth"
    metric_name = "rank_correlation"
    packages = ("scipy",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        self._processor = processor
        return ImageInputs(model, processor)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        # Images with a class calibrate as well as any.
        others = [row for row in rows if not isinstance(row, Image)]
        rows_of_kind(others, Depths, self.name)
        return [row.path for row in rows if isinstance(row, Image | Depths)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the files with the distances of rows [N], read one by one, not to fill the memory."""
        for option in ("do_center_crop", "do_pad"):
            if getattr(self._processor, option, False):
                raise TaskError(
                    f"{type(self._processor).__name__} has {option}: the places of its images are not those of the "
                    "measured distances; switch it off in preprocessor_config.json, or leave out the rows to be scored"
                )
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Depths, self.name)):
            _measured(row)
            found[at] = row.depths
        return found

    def represent(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if output.dim() != 3:
            raise TaskError(
                f"the model's output has the shape {tuple(output.shape)}, expected distances [batch, height, width]"
            )
        return output.float()

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the distances as they are."""
        return outputs

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the correlation of each row, and 1 for the row [N x 2]."""
        spearman = import_module("scipy.stats").spearmanr
        found = []
        for said, row in zip(predictions.decisions, rows_of_kind(rows, Depths, self.name), strict=True):
            true = at_size(_measured(row), said.shape)
            there = np.isfinite(true)
            flat = len(np.unique(true[there])) < 2 or len(np.unique(said[there])) < 2
            # Of one distance alone there is no order to find.
            found.append((0.0 if flat else abs(float(spearman(said[there], true[there]).statistic)), 1.0))
        return np.array(found, dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over rows."""
        return np.asarray(sums[..., 0] / sums[..., 1])

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return how far distances are from the float model's, as a share of these."""
        right, found = float_predictions.decisions, other.decisions
        return {"relative_change": float(np.abs(found - right).sum() / max(np.abs(right).sum(), np.finfo(float).tiny))}


def _measured(row: Depths) -> npt.NDArray[np.float64]:
    (width, height), depths = read_size(row.path), read_depths(row.depths)
    if depths.shape != (height, width):
        raise TaskError(
            f"{row.depths} has {depths.shape[1]} x {depths.shape[0]} places, its image {width} x {height} pixels: "
            "expected a distance for each pixel"
        )
    if not np.isfinite(depths).any():
        raise TaskError(f"{row.depths} has no distance but 0 and what is no number: take {row.path} out of the data")
    return depths
