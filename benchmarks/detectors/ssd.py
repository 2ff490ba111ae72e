"""A single-shot detector of plain torch: anchors at three strides, boxes decoded in the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SSD", "ssd_loss"]

_STRIDES = (8, 16, 32)
_SIZES = ((12.0, 17.0), (23.0, 31.0), (40.0, 52.0))
"""The sides of the square anchors at each stride, in pixels."""
_CENTER, _SIZE = 0.1, 0.2
"""The factors of predicted offsets and sizes, as in the paper."""
_MATCHED, _NEAR = 0.5, 0.4
"""An anchor with an overlap of at least the first is an object; one below the second is background."""
_NEGATIVES = 3
"""The number of background anchors in the loss for each anchor of an object."""


class _Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class SSD(nn.Module):
    """Images [B x 3 x H x W], 0 to 1, to boxes [B x A x 4] in pixels (corners) and scores [B x A x classes]."""

    anchors: Tensor

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 16, 2), _convolution(16, 32, 2))
        self.stages = nn.ModuleList([_Block(32, 64, 2), _Block(64, 96, 2), _Block(96, 128, 2)])
        self.lateral = nn.ModuleList([nn.Conv2d(width, 64, 1) for width in (64, 96, 128)])
        self.smooth = nn.ModuleList([_convolution(64, 64) for _ in _STRIDES])
        kinds = len(_SIZES[0])
        self.classes = classes
        self.scores = nn.ModuleList([self._head(kinds * (classes + 1)) for _ in _STRIDES])
        self.boxes = nn.ModuleList([self._head(kinds * 4) for _ in _STRIDES])
        self.register_buffer("anchors", _anchors(side))

    @staticmethod
    def _head(outputs: int) -> nn.Sequential:
        return nn.Sequential(_convolution(64, 64), nn.Conv2d(64, outputs, 3, 1, 1))

    def raw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B x A x (classes + 1)] and boxes [B x A x 4] in pixels."""
        x = self.stem(images)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        above, features = None, []
        for level, lateral in zip(reversed(levels), reversed(self.lateral), strict=True):
            x = lateral(level)
            above = x if above is None else x + F.interpolate(above, scale_factor=2.0, mode="nearest")
            features.append(above)
        features = [smooth(x) for smooth, x in zip(self.smooth, reversed(features), strict=True)]
        logits = torch.cat([_by_anchor(h(x), self.classes + 1) for h, x in zip(self.scores, features, strict=True)], 1)
        offsets = torch.cat([_by_anchor(h(x), 4) for h, x in zip(self.boxes, features, strict=True)], 1)
        center = self.anchors[:, :2] + _CENTER * offsets[..., :2] * self.anchors[:, 2:]
        half = torch.exp(_SIZE * offsets[..., 2:]) * self.anchors[:, 2:] / 2
        return logits, torch.cat([center - half, center + half], -1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits, boxes = self.raw(images)
        return {"boxes": boxes, "scores": torch.softmax(logits, -1)[..., :-1]}


def ssd_loss(model: SSD, images: Tensor, boxes: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Return cross entropy over objects and the hardest background, and the generalized IoU of the objects' boxes.

    ``boxes`` has the corners of the objects of each image in pixels.
    """
    logits, found = model.raw(images)
    anchors = torch.cat(
        [model.anchors[:, :2] - model.anchors[:, 2:] / 2, model.anchors[:, :2] + model.anchors[:, 2:] / 2], -1
    )
    targets = torch.full(logits.shape[:2], model.classes)
    wanted = torch.zeros_like(found)
    for at, (corners, kinds) in enumerate(zip(boxes, labels, strict=True)):
        overlap = _iou(anchors, corners)
        best, which = overlap.max(1)
        # The best anchor of each object counts, however small the overlap is.
        own = overlap.argmax(0)
        best[own], which[own] = 1.0, torch.arange(len(corners))
        targets[at] = torch.where(best >= _MATCHED, kinds[which], torch.where(best < _NEAR, model.classes, -1))
        wanted[at] = corners[which]
    objects = (targets >= 0) & (targets < model.classes)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view_as(targets)
    background = each.detach().masked_fill(targets != model.classes, -1.0).flatten()
    hardest = background.topk(min(_NEGATIVES * int(objects.sum()), background.numel())).indices
    chosen = objects.flatten().clone()
    chosen[hardest] = True
    total = objects.sum()
    overlap_loss = (1 - _generalized_iou(found[objects], wanted[objects])).sum()
    return (each.flatten()[chosen].sum() + 2 * overlap_loss) / total


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def _by_anchor(values: Tensor, width: int) -> Tensor:
    """Return the outputs of a head, one row per anchor [B x A x width]."""
    return values.permute(0, 2, 3, 1).reshape(values.shape[0], -1, width)


def _anchors(side: int) -> Tensor:
    """Return the middle, width and height of each anchor in pixels [A x 4]."""
    rows = []
    for stride, sizes in zip(_STRIDES, _SIZES, strict=True):
        places = (torch.arange(side // stride) + 0.5) * stride
        y, x = torch.meshgrid(places, places, indexing="ij")
        middles = torch.stack([x, y], -1).view(-1, 1, 2).expand(-1, len(sizes), 2)
        squares = torch.tensor(sizes).view(1, -1, 1).expand(len(middles), -1, 2)
        rows.append(torch.cat([middles, squares], -1).reshape(-1, 4))
    return torch.cat(rows)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of each box with each [N x M]."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    return common / (_areas(first)[:, None] + _areas(second)[None] - common)


def _generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the generalized intersection over union of pairs of boxes [N]."""
    common = (torch.minimum(first[:, 2:], second[:, 2:]) - torch.maximum(first[:, :2], second[:, :2])).clamp(min=0)
    common = common.prod(-1)
    union = _areas(first) + _areas(second) - common
    hull = (torch.maximum(first[:, 2:], second[:, 2:]) - torch.minimum(first[:, :2], second[:, :2])).prod(-1)
    return common / union - (hull - union) / hull
