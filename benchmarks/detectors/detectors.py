"""Small detectors of synthetic scenes: how each is built, trained, and read.

Every detector takes ``images`` or ``pixel_values`` [B x 3 x SIDE x SIDE], 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scenes import CLASSES, SIDE
from ssd import SSD, ssd_loss
from torch import Tensor, nn

from quantizer.tasks.object_detection import Detections

__all__ = ["DETECTORS", "Detector"]

Array = npt.NDArray[Any]
Loss = Callable[[Any, Tensor, list[Tensor], list[Tensor]], Tensor]

_LOWEST_SCORE = 0.001
_CANDIDATES = 300
_SAME = 0.6
"""Of two detections of a class with a higher overlap, the surer one is kept."""


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A kind of detector.

    Attributes:
        title: its name.
        build: returns the module with random weights.
        loss: the loss of a batch: module, images, corners of the boxes in pixels, and classes.
        read: the detections in each image, from the outputs of a batch.
        ready: returns the module to quantize, from the trained one.
        input_name: the name of the images.
        rate: the highest learning rate.
        steps: the number of training steps.
        is_transformer: whether NNCF should take it for one.
        save: writes a checkpoint of the trained module that ``quantizer convert`` reads; None: it has no such form.
    """

    title: str
    build: Callable[[], nn.Module]
    loss: Loss
    read: Callable[[Any], list[Detections]]
    ready: Callable[[nn.Module], nn.Module] = lambda module: module
    input_name: str = "images"
    rate: float = 2e-3
    steps: int = 2000
    is_transformer: bool = False
    save: Callable[[nn.Module, Path], None] | None = None


def _ssd_read(outputs: Any) -> list[Detections]:
    return [_without_doubles(boxes, scores) for boxes, scores in zip(outputs["boxes"], outputs["scores"], strict=True)]


def _rt_detr() -> nn.Module:
    from transformers import RTDetrResNetConfig, RTDetrV2Config, RTDetrV2ForObjectDetection

    names = dict(enumerate(CLASSES))
    widths = [32, 64, 96, 128]
    backbone = RTDetrResNetConfig(
        embedding_size=32,
        hidden_sizes=widths,
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrV2Config(
        backbone_config=backbone,
        # Batch norms of a backbone with random weights learn.
        freeze_backbone_batch_norms=False,
        encoder_in_channels=widths[1:],
        encoder_hidden_dim=64,
        encoder_ffn_dim=128,
        encoder_attention_heads=4,
        hidden_expansion=0.5,
        d_model=64,
        decoder_in_channels=[64, 64, 64],
        decoder_ffn_dim=128,
        decoder_attention_heads=4,
        decoder_layers=2,
        num_queries=30,
        num_denoising=20,
        id2label=names,
        label2id={name: at for at, name in names.items()},
    )
    return RTDetrV2ForObjectDetection(config)


def _rt_detr_loss(model: nn.Module, images: Tensor, boxes: list[Tensor], labels: list[Tensor]) -> Tensor:
    targets = []
    for corners, kinds in zip(boxes, labels, strict=True):
        middles = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], -1)
        targets.append({"boxes": middles / SIDE, "class_labels": kinds})
    loss: Tensor = model(pixel_values=images, labels=targets).loss
    return loss


def _rt_detr_save(model: nn.Module, folder: Path) -> None:
    """Write the model as published checkpoints are: with frozen batch norms, and its image processor."""
    from transformers import RTDetrImageProcessorPil

    model.config.freeze_backbone_batch_norms = True
    model.save_pretrained(folder)
    RTDetrImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def _rt_detr_read(outputs: Any) -> list[Detections]:
    logits, boxes = (torch.as_tensor(np.asarray(outputs[name])) for name in ("logits", "pred_boxes"))
    found = []
    for scores, places in zip(logits.sigmoid(), boxes, strict=True):
        best, at = scores.flatten().sort(descending=True, stable=True)
        best, at = best[:_CANDIDATES], at[:_CANDIDATES]
        chosen = places[at // scores.shape[1]] * SIDE
        corner = torch.cat([chosen[:, :2] - chosen[:, 2:] / 2, chosen[:, 2:]], -1)
        found.append(Detections(corner.double().numpy(), (at % scores.shape[1]).numpy(), best.double().numpy()))
    return found


class _Detections(nn.Module):
    """A detector of transformers that returns its logits and boxes alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        outputs = self.model(pixel_values)
        return {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}


class _Plain(nn.Module):
    """An ultralytics model that returns its predictions alone [B x (4 + classes) x A]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        predictions: Tensor = self.model(images)
        return predictions


def _yolo(name: str) -> nn.Module:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model: nn.Module = DetectionModel(f"{name}.yaml", nc=len(CLASSES), verbose=False)
    model.args = get_cfg()
    return model


def _yolo_loss(model: nn.Module, images: Tensor, boxes: list[Tensor], labels: list[Tensor]) -> Tensor:
    middles = [torch.cat([(c[:, :2] + c[:, 2:]) / 2, c[:, 2:] - c[:, :2]], -1) / SIDE for c in boxes]
    batch = {
        "img": images,
        "bboxes": torch.cat(middles),
        "cls": torch.cat(labels).float()[:, None],
        "batch_idx": torch.cat([torch.full((len(kinds),), float(at)) for at, kinds in enumerate(labels)]),
    }
    loss, _ = model.loss(batch)
    total: Tensor = loss.sum()
    return total


def _yolo_ready(model: nn.Module) -> nn.Module:
    head = model.model[-1]
    head.export, head.format = True, "onnx"
    return _Plain(model).eval()


def _yolo26_ready(model: nn.Module) -> nn.Module:
    # The head that needs no non-maximum suppression.
    model.model[-1].end2end = True
    return _yolo_ready(model)


def _yolo26_read(outputs: Any) -> list[Detections]:
    found = []
    for rows in np.asarray(next(iter(outputs.values())) if isinstance(outputs, dict) else outputs, dtype=np.float64):
        corners, scores, kinds = rows[:, :4], rows[:, 4], rows[:, 5]
        sized = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], -1)
        found.append(Detections(sized, kinds.round().astype(np.int64), scores))
    return found


def _yolo_read(outputs: Any) -> list[Detections]:
    found = []
    for rows in np.asarray(next(iter(outputs.values())) if isinstance(outputs, dict) else outputs):
        middles = rows[:4].T
        corners = np.concatenate([middles[:, :2] - middles[:, 2:] / 2, middles[:, :2] + middles[:, 2:] / 2], -1)
        found.append(_without_doubles(corners, rows[4:].T))
    return found


def _without_doubles(boxes: Any, scores: Any) -> Detections:
    """Return the detections of an image after non-maximum suppression, from corners [A x 4] and scores [A x C]."""
    corners, values = np.asarray(boxes, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    places, kinds = np.nonzero(values > _LOWEST_SCORE)
    sure = values[places, kinds]
    order = np.argsort(-sure, kind="stable")[:_CANDIDATES]
    places, kinds, sure, found = places[order], kinds[order], sure[order], corners[places[order]]
    low = np.maximum(found[:, None, :2], found[None, :, :2])
    high = np.minimum(found[:, None, 2:], found[None, :, 2:])
    common = (high - low).clip(min=0).prod(-1)
    area = (found[:, 2:] - found[:, :2]).prod(-1)
    double = (common > _SAME * (area[:, None] + area[None] - common)) & (kinds[:, None] == kinds[None])
    kept = np.ones(len(found), dtype=bool)
    for at in range(len(found)):
        if kept[at]:
            kept[at + 1 :] &= ~double[at, at + 1 :]
    sized = np.concatenate([found[:, :2], found[:, 2:] - found[:, :2]], -1)
    return Detections(sized[kept], kinds[kept], sure[kept])


DETECTORS: dict[str, Detector] = {
    "ssd": Detector(
        title="SSD, plain torch", build=lambda: SSD(len(CLASSES), SIDE), loss=ssd_loss, read=_ssd_read, steps=4000
    ),
    "rt-detr": Detector(
        title="RT-DETRv2, transformers",
        build=_rt_detr,
        loss=_rt_detr_loss,
        read=_rt_detr_read,
        input_name="pixel_values",
        rate=1e-3,
        ready=lambda model: _Detections(model).eval(),
        is_transformer=True,
        save=_rt_detr_save,
        steps=4000,
    ),
    "yolo11n": Detector(
        title="YOLO11n, ultralytics",
        build=lambda: _yolo("yolo11n"),
        loss=_yolo_loss,
        read=_yolo_read,
        ready=_yolo_ready,
        steps=2500,
    ),
    "yolo26n": Detector(
        title="YOLO26n, ultralytics",
        build=lambda: _yolo("yolo26n"),
        loss=_yolo_loss,
        read=_yolo26_read,
        ready=_yolo26_ready,
        steps=4000,
    ),
}
"""All detectors, by the name that the command takes."""
