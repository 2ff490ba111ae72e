"""The task ``object-detection``, scored by average precision as COCO defines it.

pycocotools matches detections with objects, which is slow and done once per image. Precision and recall of a bootstrap
resample follow from the matches of its images, each weighted by how often it was drawn.

Shapes: N images, B images in a batch, Q candidates of an image, C or K classes, R resamples, T thresholds of overlap, D
detections.
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
from quantizer.tasks.datasets.examples import Boxes, Example
from quantizer.tasks.image_inputs import ImageInputs, read_size
from quantizer.tasks.inputs import Batch, Inputs, Sample
from quantizer.tasks.outputs import first_output
from quantizer.tasks.task import JudgedTask, Predictions, examples_of_kind, tasks

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections of a model in one image.

    Attributes:
        boxes: x and y of the upper left corner, width and height [D x 4], in pixels of the image.
        classes: the class number of each [D].
        scores: the confidence of each [D].
    """

    boxes: Array
    classes: Array
    scores: Array


@dataclass(frozen=True, eq=False)
class Matches:
    """The matches of one class in one image.

    Attributes:
        scores: the confidence of at most 100 detections [D], in descending order.
        right: whether each matches an object of the image, at each threshold [T x D].
        counts: whether each counts; detections in a crowd do not [T x D].
        objects: the number of objects of the class in the image, without crowds.
    """

    scores: Array
    right: Array
    counts: Array
    objects: int


def match_objects(detections: Sequence[Detections], examples: Sequence[Boxes], classes: Sequence[str]) -> Array:
    """Return the ``Matches`` of each image and class [N x K], by COCO's rules."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, results = COCO(), []
    truth.dataset = {
        "info": {},
        "images": [{"id": at} for at in range(len(examples))],
        "categories": [{"id": at, "name": name} for at, name in enumerate(classes)],
        "annotations": [
            annotation for at, example in enumerate(examples) for annotation in _annotations(at, example, classes)
        ],
    }
    for number, annotation in enumerate(truth.dataset["annotations"], start=1):
        annotation["id"] = number
    for at, objects in enumerate(detections):
        for box, kind, score in zip(objects.boxes, objects.classes, objects.scores, strict=True):
            results.append(
                {"image_id": at, "category_id": int(kind), "bbox": [float(x) for x in box], "score": float(score)}
            )
    # pycocotools prints its progress.
    with redirect_stdout(StringIO()):
        truth.createIndex()
        judged = COCOeval(truth, truth.loadRes(results) if results else COCO(), "bbox")
        judged.params.areaRng, judged.params.areaRngLbl = judged.params.areaRng[:1], judged.params.areaRngLbl[:1]
        judged.params.imgIds, judged.params.catIds = list(range(len(examples))), list(range(len(classes)))
        judged.evaluate()
    by_class = np.array([_matches(record) for record in judged.evalImgs], dtype=object)
    return by_class.reshape(len(classes), len(examples)).T


def average_precision(matches: Array, weights: Array) -> Array:
    """Return the mean average precision (mAP) of resamples [R], over present classes and thresholds 0.5 to 0.95.

    The precision at a recall is the highest at that recall or beyond, averaged over the recalls 0, 0.01, ..., 1.

    Args:
        matches: the ``Matches`` of each image and class [N x K].
        weights: how often each image is in each resample [R x N].
    """
    sums, present = np.zeros(len(weights)), np.zeros(len(weights))
    for column in matches.T:
        precision = _of_class(column, weights)
        known = np.isfinite(precision)
        sums[known] += precision[known]
        present += known
    return np.asarray(sums / np.maximum(present, 1))


def _of_class(column: Sequence[Matches], weights: Array) -> Array:
    """Return the average precision of one class in each resample [R]; NaN for resamples without its objects."""
    total = weights @ np.array([match.objects for match in column])
    result = np.where(total > 0, 0.0, np.nan)
    image = np.repeat(np.arange(len(column)), [len(match.scores) for match in column])
    if not len(image) or not (total > 0).any():
        return result
    order = np.argsort(-np.concatenate([match.scores for match in column]), kind="stable")
    right = np.concatenate([match.right for match in column], axis=1)[:, order]
    counts = np.concatenate([match.counts for match in column], axis=1)[:, order]
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
        picked = [envelope[threshold, np.searchsorted(recall[threshold], recalls)] for threshold in range(len(hits))]
        result[at] = np.mean(picked)
    return result


def _annotations(at: int, example: Boxes, classes: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "image_id": at,
            "category_id": classes.index(label),
            "bbox": list(box),
            "area": box[2] * box[3],
            "iscrowd": int(crowd),
        }
        for box, label, crowd in zip(example.boxes, example.labels, example.crowds, strict=True)
    ]


def _matches(record: dict[str, Any] | None) -> Matches:
    """Return the matches in pycocotools' record of a class in an image; None: neither objects nor detections."""
    if record is None:
        return Matches(np.zeros(0), np.zeros((10, 0), dtype=bool), np.zeros((10, 0), dtype=bool), 0)
    return Matches(
        np.asarray(record["dtScores"], dtype=np.float64),
        np.asarray(record["dtMatches"]) > 0,
        ~np.asarray(record["dtIgnore"], dtype=bool),
        int(np.sum(~np.asarray(record["gtIgnore"], dtype=bool))),
    )


_SURE = 0.5
"""The lowest score of a detection that counts."""


@tasks.add("object-detection")
class ObjectDetection(JudgedTask):
    """Images to logits and boxes of candidates, to detections, scored by mean average precision (mAP).

    Detections are made outside of the engine, in float, by ``post_process_object_detection`` of the image processor.
    """

    name = "object-detection"
    reads = "image"
    auto_class = "AutoModelForObjectDetection"
    pipeline_class = "ObjectDetectionPipeline"
    output_name = "logits"
    further_outputs = ("pred_boxes",)
    labels = "part"
    metric_name = "mean_ap"
    packages = ("pycocotools",)

    def make_inputs(self, model: torch.nn.Module, processor: Any, max_length: int, min_length: int) -> Inputs:
        if not hasattr(processor, "post_process_object_detection"):
            raise TaskError(
                f"{type(processor).__name__} has no post_process_object_detection: expected the image processor of a "
                "detector such as DETR or YOLOS"
            )
        self._classes = class_names(getattr(model, "config", None))
        inputs = ImageInputs(model, processor)
        self._processor = inputs.processor
        return inputs

    def samples(self, examples: Sequence[Example]) -> list[Sample]:
        return [example.path for example in examples_of_kind(examples, Boxes, self.name)]

    def targets(self, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the examples [N] as objects."""
        targets = np.empty(len(examples), dtype=object)
        for at, example in enumerate(examples_of_kind(examples, Boxes, self.name)):
            unknown = sorted({*example.labels} - {*self._classes})
            if unknown:
                raise TaskError(
                    f"{example.path}: its objects have the class {unknown[0]!r}, which the model does not have; "
                    "expected one of "
                    f"{', '.join(self._classes[:8])}{', ...' if len(self._classes) > 8 else ''}"
                )
            targets[at] = example
        return targets

    def collect(self, result: object, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the logits and boxes of each image's candidates, B tensors [Q x (C + 4)]."""
        names = (self.output_name, *self.further_outputs)
        logits, boxes = (first_output(result, name, place) for place, name in enumerate(names))
        if logits.dim() != 3 or boxes.shape != (*logits.shape[:2], 4):
            raise TaskError(
                f"the model's outputs have the shapes {tuple(logits.shape)} and {tuple(boxes.shape)}, expected logits "
                "[batch, candidates, classes] and pred_boxes [batch, candidates, 4]"
            )
        return list(torch.cat([logits, boxes], dim=-1))

    def decide(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the detections in each image [N], with boxes relative to the sides of the image."""
        values = torch.from_numpy(outputs)
        processed = self._processor.post_process_object_detection(
            SimpleNamespace(logits=values[..., :-4], pred_boxes=values[..., -4:]), threshold=0.0
        )
        detections = np.empty(len(outputs), dtype=object)
        for at, result in enumerate(processed):
            left, top, right, bottom = result["boxes"].double().unbind(dim=-1)
            boxes = torch.stack([left, top, right - left, bottom - top], dim=-1)
            detections[at] = Detections(boxes.numpy(), result["labels"].numpy(), result["scores"].numpy())
        return detections

    def judge(self, predictions: Predictions, examples: Sequence[Example]) -> npt.NDArray[Any]:
        """Return the ``Matches`` of each image and class [N x K]."""
        boxes: list[Boxes] = list(self.targets(examples))
        detections = [
            _in_pixels(detection, example) for detection, example in zip(predictions.decisions, boxes, strict=True)
        ]
        return match_objects(detections, boxes, self._classes)

    def metric(self, decisions: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the mAP of matches [N x K], or of each resample of [R x N x K]."""
        # Resamples share the objects of their images: each distinct image gets a weight per resample.
        indices_of: dict[int, int] = {}
        images: list[npt.NDArray[Any]] = []
        drawn = []
        for resample in decisions.reshape(-1, *decisions.shape[-2:]):
            for image in resample:
                if id(image[0]) not in indices_of:
                    indices_of[id(image[0])] = len(images)
                    images.append(image)
            drawn.append([indices_of[id(image[0])] for image in resample])
        weights = np.array([np.bincount(indices, minlength=len(images)) for indices in drawn])
        return average_precision(np.array(images), weights).reshape(decisions.shape[:-2])

    def paired(self, float_predictions: Predictions, other: Predictions) -> dict[str, float]:
        """Return the share of the float model's detections that the other model misses.

        Only detections with a score of at least 0.5 count. One is found again if the other model has a detection of its
        class with an overlap (IoU) of at least 0.5. The result is empty if the float model has no such detection.
        """
        lost = total = 0
        for first, second in zip(float_predictions.decisions, other.decisions, strict=True):
            sure, again = first.scores >= _SURE, second.scores >= _SURE
            overlap = _overlaps(first.boxes[sure], second.boxes[again])
            same = first.classes[sure][:, None] == second.classes[again][None]
            lost += int((~((overlap >= 0.5) & same).any(axis=1)).sum())
            total += int(sure.sum())
        return {"objects_lost": lost / total} if total else {}


def _in_pixels(detections: Detections, example: Boxes) -> Detections:
    width, height = read_size(example.path)
    return Detections(
        detections.boxes * np.array([width, height, width, height]), detections.classes, detections.scores
    )


def _overlaps(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the intersection over union of each box of the first list with each of the second [D1 x D2]."""
    from pycocotools.mask import iou

    if not len(first) or not len(second):
        return np.zeros((len(first), len(second)))
    return np.asarray(iou(first, second, [0] * len(second)))
