"""Quantize a trained YOLO11n, deliver it, and detect objects with our engine and with ``YOLO``: ``result.json``.

python yolo_program.py BACKEND WEIGHTS
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import torch
from detectors import DETECTORS
from scenes import CLASSES, SIDE, scene
from ultralytics import YOLO
from ultralytics.data.augment import LetterBox
from ultralytics.utils.nms import TorchNMS, non_max_suppression
from ultralytics.utils.ops import scale_boxes

import quantizer

_CALLS = 30
_FIRST = 1_000_000
"""The number of the first scene that is not a training scene."""


def tensor_of(images: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))).float() / 255


def sqnr(right: torch.Tensor, given: torch.Tensor) -> float:
    noise = float(((right - given) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((right**2).sum()) / noise)


def _pictures() -> list[Any]:
    """Scenes as they are, and one with another height."""
    images = [scene(_FIRST + at).image for at in range(8)]
    return [*images, np.concatenate([images[0], images[1][: SIDE // 2]])]


def main(backend: str, weights: str) -> None:
    """Write ``result.json``."""
    model: Any = DETECTORS["yolo11n"].build()
    model.load_state_dict(torch.load(weights))
    model.names, model.task = dict(enumerate(CLASSES)), "detect"
    model.model[-1].export, model.model[-1].format = True, "onnx"
    calibration = tensor_of([scene(at).image for at in range(128)])
    made = quantizer.quantize_model(model.eval(), calibration.split(8), backend=backend, progress=False)
    place = made.save("yolo11n-int8", deliver=["ultralytics"]) / "ultralytics"
    (graph,) = (path for path in place.iterdir() if path.name != "README.md")
    yolo, pictures = YOLO(graph), _pictures()
    if "torchvision" not in sys.modules:
        without_torchvision()
    compute_in_float32()
    # It takes images as OpenCV reads them.
    found = [yolo(picture[..., ::-1].copy(), verbose=False)[0] for picture in pictures]
    client, one = yolo.predictor.model, tensor_of(pictures[:1])
    ours = [_boxes(made.engine, picture) for picture in pictures]
    with torch.no_grad():
        expected, given, floats = made.engine(one), client(one), made.model(one)
    seconds: dict[str, list[float]] = {"ours": [], "its": []}
    for _ in range(_CALLS):
        for name, call in (("ours", made.engine), ("its", client)):
            began = time.perf_counter()
            call(one)
            seconds[name].append(time.perf_counter() - began)
    result = {
        "names": client.names,
        "task": client.task,
        "imgsz": list(client.imgsz),
        "stride": client.stride,
        "batch": client.batch,
        "ours": ours,
        "yolo": [one.boxes.data.tolist() for one in found],
        "row": {
            "sqnr": sqnr(expected, given),
            "engine": sqnr(floats, expected),
            **{name: median(times) for name, times in seconds.items()},
        },
    }
    Path("result.json").write_text(json.dumps(result), encoding="utf-8")


def compute_in_float32() -> None:
    """Make OpenVINO compute in float32 as our engine, for which YOLO has no setting."""
    compile_model = openvino.Core.compile_model

    def in_float32(core: Any, model: Any, device_name: str, config: Any) -> Any:
        return compile_model(core, model, device_name, {**config, "INFERENCE_PRECISION_HINT": "f32"})

    openvino.Core.compile_model = in_float32


def _boxes(engine: Any, picture: Any) -> list[list[float]]:
    """Return the boxes of our engine between the steps of ultralytics, with its default limits."""
    image = tensor_of([LetterBox((SIDE, SIDE), auto=False)(image=picture)])
    (boxes,) = non_max_suppression(engine(image), 0.25, 0.7)
    boxes[:, :4] = scale_boxes(image.shape[2:], boxes[:, :4], picture.shape)
    rows: list[list[float]] = boxes.tolist()
    return rows


def without_torchvision() -> None:
    """Take the suppression of ultralytics itself, because a torch for CPUs has no torchvision on PyPI.

    The torchvision of PyPI raises RuntimeError beside it.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = SimpleNamespace(ops=SimpleNamespace(nms=TorchNMS.nms))  # type: ignore[assignment]


if __name__ == "__main__":
    main(*sys.argv[1:])
