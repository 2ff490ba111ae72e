"""Doubts about calibration data and about the model's mode: possible, and more often a mistake. Each is a warning.

A doubt is raised on what can be told for certain: the mode of the model, the number of rows, whole numbers from 0 to
255 in an image, and neighbouring pixels that have nothing to do with each other.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationWarning

FEWEST_ROWS = 32
"""With fewer rows than that ranges depend on which rows they are."""

_PASSED = ("quantizer", "tqdm")
"""Packages whose frames lie between a user's line and a warning."""

_IMAGE = 4  # axes of a batch of images: [B, C, H, W]
_BYTE = 255
_BRIGHT = 128
"""Pixels of photographs reach this value in any batch; counts and flags of another kind of input rarely do."""
_FEWEST_PAIRS = 4096
_RELATED = 0.05
"""Correlation of neighbouring pixels: noise of 4,096 pairs has less in 99.9% of cases; photographs have 0.8 or more."""


def doubts_of_calibration(model: nn.Module, rows: int) -> Iterator[str]:
    """Yield the doubts about a calibration: the model computes otherwise in the mode that it is in, or rows are few."""
    changing = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    if any(module.training and isinstance(module, changing) for module in model.modules()):
        yield (
            f"the {type(model).__name__} is in train mode: calibration, and every engine, computes in eval mode, so "
            "what it returns now is no measure for them; call model.eval()"
        )
    if rows < FEWEST_ROWS:
        yield (
            f"calibrated on {rows} {'row' if rows == 1 else 'rows'}: ranges of fewer than {FEWEST_ROWS} depend on "
            "which rows they are; give 128 or more, like those that the model will see"
        )


def doubts_of_batch(batch: Any) -> Iterator[str]:
    """Yield the doubts about images [B, C, H, W] of floats in a batch: bytes, or noise."""
    values = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == _IMAGE and value.numel():
            yield from _doubts_of_images(value.detach().float())


def _doubts_of_images(images: Tensor) -> Iterator[str]:
    low, high = images.aminmax()
    if low >= 0 and _BRIGHT <= high <= _BYTE and torch.equal(images, images.round()):
        yield (
            f"images of the calibration data are whole numbers from {low:.0f} to {high:.0f}, as pixels are before they "
            "are normalized: if the model is used on normalized images, calibrate it on such"
        )
    left, right = images[..., :-1].flatten(), images[..., 1:].flatten()
    if left.numel() < _FEWEST_PAIRS or low == high:
        return
    related = float(torch.corrcoef(torch.stack([left, right]))[0, 1])
    if abs(related) < _RELATED:
        yield (
            f"images of the calibration data look like noise (neighbouring pixels correlate by {related:.2f}): ranges "
            "and scores of made-up images say nothing of real ones"
        )


def warn_user(doubts: Iterable[str]) -> None:
    """Warn of each doubt, at the line outside of this package that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    for doubt in doubts:
        warnings.warn(doubt, CalibrationWarning, stacklevel=level)
