"""The task ``object-detection``, scored by average precision as COCO defines it.

pycocotools matches what is found with what is there, which is slow and done once for each image. Precision and recall
of a resample follow from the matches of its images, each counted as often as the image was drawn.

Shapes: N images, R resamples, K classes, T thresholds of overlap, D objects found of one class in all images.

Shapes: N rows, B rows of a batch, Q candidates of a model in an image, C classes, D objects found in an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantizer.errors import TaskError
from quantizer.tasks.classification import class_names
from quantizer.tasks.datasets.rows import Boxes, Row
from quantizer.tasks.image_inputs import ImageInputs, read_size
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import JudgedTask, Predictions, rows_of_kind, tasks

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Found:
    """Objects that a model found in one image.

    Attributes:
        boxes: x and y of the upper left corner, width and height [D x 4], in pixels of the image.
        classes: the place of the class of each in the list of classes [D].
        scores: how sure the model is of each [D].
    """

    boxes: Array
    classes: Array
    scores: Array


@dataclass(frozen=True, eq=False)
class Matches:
    """The matches of one class in one image.

    Attributes:
        scores: of the objects found [D], at most 100, the best first.
        right: whether each is an object of the image, at each threshold [T x D].
        counts: whether each counts at all: one that lies in a crowd does not [T x D].
        there: the number of objects of the class in the image, without crowds.
    """

    scores: Array
    right: Array
    counts: Array
    there: int


def match_objects(found: Sequence[Found], rows: Sequence[Boxes], classes: Sequence[str]) -> Array:
    """Return the ``Matches`` of each image and class [N x K], as objects, by COCO's rules."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, said = COCO(), []
    truth.dataset = {
        "info": {},
        "images": [{"id": at} for at in range(len(rows))],
        "categories": [{"id": at, "name": name} for at, name in enumerate(classes)],
        "annotations": [annotation for at, row in enumerate(rows) for annotation in _annotations(at, row, classes)],
    }
    for number, annotation in enumerate(truth.dataset["annotations"], start=1):
        annotation["id"] = number
    for at, objects in enumerate(found):
        for box, kind, score in zip(objects.boxes, objects.classes, objects.scores, strict=True):
            said.append(
                {"image_id": at, "category_id": int(kind), "bbox": [float(x) for x in box], "score": float(score)}
            )
    # pycocotools prints what it does.
    with redirect_stdout(StringIO()):
        truth.createIndex()
        judged = COCOeval(truth, truth.loadRes(said) if said else COCO(), "bbox")
        judged.params.areaRng, judged.params.areaRngLbl = judged.params.areaRng[:1], judged.params.areaRngLbl[:1]
        judged.params.imgIds, judged.params.catIds = list(range(len(rows))), list(range(len(classes)))
        judged.evaluate()
    by_class = np.array([_matches(told) for told in judged.evalImgs], dtype=object)
    return by_class.reshape(len(classes), len(rows)).T


def average_precision(matches: Array, weights: Array) -> Array:
    """Return the mean average precision [R] of resamples, over classes that are there and thresholds 0.5 to 0.95.

    Precision at a recall is the highest at that recall or beyond, and the mean is over the recalls 0, 0.01, ... 1.

    Args:
        matches: those of each image and class [N x K].
        weights: how often each image is in each resample [R x N].
    """
    sums, there = np.zeros(len(weights)), np.zeros(len(weights))
    for column in matches.T:
        precision = _of_class(column, weights)
        known = np.isfinite(precision)
        sums[known] += precision[known]
        there += known
    return np.asarray(sums / np.maximum(there, 1))


def _of_class(column: Sequence[Matches], weights: Array) -> Array:
    """Return the average precision of one class in each resample [R]; NaN where none of its objects are there."""
    total = weights @ np.array([one.there for one in column])
    result = np.where(total > 0, 0.0, np.nan)
    image = np.repeat(np.arange(len(column)), [len(one.scores) for one in column])
    if not len(image) or not (total > 0).any():
        return result
    order = np.argsort(-np.concatenate([one.scores for one in column]), kind="stable")
    right = np.concatenate([one.right for one in column], axis=1)[:, order]
    counts = np.concatenate([one.counts for one in column], axis=1)[:, order]
    recalls = np.linspace(0, 1, 101)
    for at in np.flatnonzero(total > 0):
        times = weights[at, image[order]]
        hits = np.cumsum(times * (right & counts), axis=1)
        misses = np.cumsum(times * (~right & counts), axis=1)
        precision = hits / np.maximum(hits + misses, np.spacing(1))
        envelope = np.append(
            np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1], np.zeros((len(hits), 1)), axis=1
        )
        recall = hits / total[at]
        picked = [envelope[row, np.searchsorted(recall[row], recalls)] for row in range(len(hits))]
        result[at] = np.mean(picked)
    return result


def _annotations(at: int, row: Boxes, classes: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "image_id": at,
            "category_id": classes.index(label),
            "bbox": list(box),
            "area": box[2] * box[3],
            "iscrowd": int(crowd),
        }
        for box, label, crowd in zip(row.boxes, row.labels, row.crowds, strict=True)
    ]


def _matches(told: dict[str, Any] | None) -> Matches:
    """Return the matches of pycocotools' record of a class in an image; None: neither there nor found."""
    if told is None:
        return Matches(np.zeros(0), np.zeros((10, 0), dtype=bool), np.zeros((10, 0), dtype=bool), 0)
    return Matches(
        np.asarray(told["dtScores"], dtype=np.float64),
        np.asarray(told["dtMatches"]) > 0,
        ~np.asarray(told["dtIgnore"], dtype=bool),
        int(np.sum(~np.asarray(told["gtIgnore"], dtype=bool))),
    )


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
