"""The task ``object-detection``: boxes and classes of objects, scored by mean average precision (mAP).

Shapes: N rows, B rows of a batch, Q candidates of a model in an image, C classes, D objects found in an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names
from quantizer.tasks.counted import JudgedTask
from quantizer.tasks.datasets.rows import Boxes, Row
from quantizer.tasks.image_inputs import ImageInputs, read_size
from quantizer.tasks.images.average_precision import Found, average_precision, match_objects
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import Predictions, tasks

_SURE = 0.5
"""The score from which on a model says that an object is there."""


@tasks.add("object-detection")
class ObjectDetection(JudgedTask):
    """Images to logits and boxes of candidates; objects are made of them outside of the engine, in float.

    The image processor's own ``post_process_object_detection`` makes them, and pycocotools says which are right.
    """

    name = "object-detection"
    reads = "image"
    auto_class = "AutoModelForObjectDetection"
    output_name = "logits"
    labels = "part"
    metric_name = "mean_ap"
    packages = ("pycocotools",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        if not hasattr(processor, "post_process_object_detection"):
            raise TaskError(
                f"{type(processor).__name__} makes no objects of a model's candidates: expected an image processor "
                "with post_process_object_detection, as that of DETR or YOLOS"
            )
        self._classes = class_names(getattr(model, "config", None))
        self._processor = processor
        return ImageInputs(model, processor)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.path for row in rows_of_kind(rows, Boxes, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the rows [N] as objects."""
        found = np.empty(len(rows), dtype=object)
        for at, row in enumerate(rows_of_kind(rows, Boxes, self.name)):
            unknown = sorted({*row.labels} - {*self._classes})
            if unknown:
                raise TaskError(
                    f"{row.path}: its objects have the class {unknown[0]!r}, which the model does not have; it has "
                    f"{', '.join(self._classes[:8])}{', ...' if len(self._classes) > 8 else ''}"
                )
            found[at] = row
        return found

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the logits and boxes of each image's candidates, B tensors [Q x (C + 4)]."""
        logits, boxes = first_output(result, "logits"), first_output(result, "pred_boxes", 1)
        if logits.dim() != 3 or boxes.shape != (*logits.shape[:2], 4):
            raise TaskError(
                f"the model's outputs have the shapes {tuple(logits.shape)} and {tuple(boxes.shape)}, expected logits "
                "[batch, candidates, classes] and pred_boxes [batch, candidates, 4]"
            )
        return list(torch.cat([logits, boxes], dim=-1))

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return what was found in each image [N] as objects; their boxes are shares of the image's sides."""
        values = torch.from_numpy(outputs)
        made = self._processor.post_process_object_detection(
            SimpleNamespace(logits=values[..., :-4], pred_boxes=values[..., -4:]), threshold=0.0
        )
        found = np.empty(len(outputs), dtype=object)
        for at, one in enumerate(made):
            left, top, right, bottom = one["boxes"].double().unbind(dim=-1)
            boxes = torch.stack([left, top, right - left, bottom - top], dim=-1)
            found[at] = Found(boxes.numpy(), one["labels"].numpy(), one["scores"].numpy())
        return found

    def judge(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the matches of each image and class [N x K], as objects."""
        boxes: list[Boxes] = list(self.targets(rows))
        found = [_in_pixels(one, row) for one, row in zip(predictions.decisions, boxes, strict=True)]
        return match_objects(found, boxes, self._classes)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the mAP of matches [N x K], or of those of resamples [R x N x K]."""
        # A resample holds the very objects that it was drawn from: each is weighted by how often it was.
        places: dict[int, int] = {}
        rows: list[npt.NDArray[Any]] = []
        drawn = []
        for resample in decisions.reshape(-1, *decisions.shape[-2:]):
            for row in resample:
                if id(row[0]) not in places:
                    places[id(row[0])] = len(rows)
                    rows.append(row)
            drawn.append([places[id(row[0])] for row in resample])
        weights = np.array([np.bincount(one, minlength=len(rows)) for one in drawn])
        return average_precision(np.array(rows), weights).reshape(decisions.shape[:-2])

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of the float model's objects that the other model does not find where they are.

        An object is what has a score of 0.5 or more, and is found again by one of its class that overlaps it by half.
        Nothing is returned if the float model is sure of no object.
        """
        lost = there = 0
        for first, second in zip(float_predictions.decisions, other.decisions, strict=True):
            sure, again = first.scores >= _SURE, second.scores >= _SURE
            overlap = _overlaps(first.boxes[sure], second.boxes[again])
            same = first.classes[sure][:, None] == second.classes[again][None]
            lost += int((~((overlap >= 0.5) & same).any(axis=1)).sum())
            there += int(sure.sum())
        return {"objects_lost": lost / there} if there else {}


def _in_pixels(found: Found, row: Boxes) -> Found:
    width, height = read_size(row.path)
    return Found(found.boxes * np.array([width, height, width, height]), found.classes, found.scores)


def _overlaps(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the intersection over union of each two boxes, of both lists."""
    from pycocotools.mask import iou

    if not len(first) or not len(second):
        return np.zeros((len(first), len(second)))
    return np.asarray(iou(first, second, [0] * len(second)))
