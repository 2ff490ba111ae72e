"""Quantize a YOLO11n of masks or poses with random weights, and load it with ``YOLO``: ``result.json``.

python yolo_tasks_program.py BACKEND TASK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from scenes import CLASSES, scene
from torch import Tensor
from ultralytics import YOLO
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import PoseModel, SegmentationModel
from yolo_program import compute_in_float32, sqnr, tensor_of, without_torchvision

import quantizer

_LEAST = 0.001
"""The lowest confidence of a detection of random weights."""


def _model(task: str) -> Any:
    if task == "segment":
        model: Any = SegmentationModel("yolo11n-seg.yaml", nc=len(CLASSES), verbose=False)
    else:
        model = PoseModel("yolo11n-pose.yaml", nc=1, data_kpt_shape=(5, 3), verbose=False)
    head = model.model[-1]
    model.args, model.names, model.task = get_cfg(), dict(enumerate(CLASSES[: head.nc])), task
    head.export, head.format = True, "onnx"
    return model


def _tensors(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [leaf for output in outputs for leaf in _tensors(output)]


def main(backend: str, task: str) -> None:
    """Write ``result.json``."""
    torch.manual_seed(0)
    model, calibration = _model(task), tensor_of([scene(at).image for at in range(32)])
    with torch.no_grad():
        # Batch norms learn the values of the random weights.
        for _ in range(10):
            model.train()(calibration)
    made = quantizer.quantize_model(model.eval(), calibration.split(8), backend=backend, progress=False)
    place = made.save("yolo11n-int8", deliver=["ultralytics"]) / "ultralytics"
    (graph,) = (path for path in place.iterdir() if path.name != "README.md")
    if "torchvision" not in sys.modules:
        without_torchvision()
    compute_in_float32()
    yolo, one = YOLO(graph), calibration[:1]
    (found,) = yolo(scene(0).image[..., ::-1].copy(), verbose=False, conf=_LEAST)
    client = yolo.predictor.model
    with torch.no_grad():
        expected, given, floats = (_tensors(call(one)) for call in (made.engine, client, made.model))
    result = {
        "task": client.task,
        "detections": len(found.boxes),
        "masks": None if found.masks is None else list(found.masks.data.shape),
        "keypoints": None if found.keypoints is None else list(found.keypoints.data.shape),
        "shapes": [[list(output.shape) for output in outputs] for outputs in (expected, given)],
        "sqnr": min(map(sqnr, expected, given)),
        "engine": min(map(sqnr, floats, expected)),
    }
    Path("result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
