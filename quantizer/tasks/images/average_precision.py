"""Average precision of objects in images, as COCO defines it, of all rows or of resamples of them.

pycocotools matches what is found with what is there, which is slow and done once for each image. Precision and recall
of a resample follow from the matches of its images, each counted as often as the image was drawn.

Shapes: N images, R resamples, K classes, T thresholds of overlap, D objects found of one class in all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from quantizer.tasks.datasets.rows import Boxes

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
