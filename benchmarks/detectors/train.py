"""Train a small detector on synthetic scenes, and keep its weights.

    python benchmarks/detectors/train.py NAME... [--steps N]

The weights lie in ``benchmarks/detectors/weights``, which git ignores. ``trained`` reads them, and trains where they
are missing. A training that was interrupted resumes from its last checkpoint.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import numpy as np
import torch
from detectors import DETECTORS, Detector
from scenes import Scene, scene
from torch import Tensor, nn

__all__ = ["TRAINING", "trained"]

TRAINING = 3000
"""Scenes from 0 to this number train."""

_WEIGHTS = Path(__file__).resolve().parent / "weights"
_BATCH = 16
_WARMUP = 100
_SHOWN = 50
_EMA = 0.998
_DECAY = 1e-4
_LARGEST_GRADIENT = 10.0


def trained(name: str, steps: int | None = None) -> nn.Module:
    """Return a trained detector in eval mode."""
    detector = DETECTORS[name]
    torch.manual_seed(0)
    model = detector.build()
    path = _WEIGHTS / f"{name}.pt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        checkpoint = path.with_suffix(".checkpoint")
        weights = _train(detector, model, detector.steps if steps is None else steps, checkpoint)
        torch.save(weights, path)
        checkpoint.unlink(missing_ok=True)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def _train(detector: Detector, model: nn.Module, steps: int, checkpoint: Path) -> dict[str, Tensor]:
    """Return the moving average of the weights."""
    # Norms, biases and embeddings are not decayed.
    decayed = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=detector.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min(1.0, (at + 1) / _WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * at / steps)) / 2)
    )
    average = copy.deepcopy(model).eval()
    parts = {"model": model, "average": average, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        first = stored["step"]
        for name, part in parts.items():
            part.load_state_dict(stored[name])
    model.train()
    began, losses = time.monotonic(), []
    for step in range(first, steps):
        images, boxes, labels = _batch(np.random.default_rng(step))
        loss = detector.loss(model, images, boxes, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        optimizer.step()
        schedule.step()
        _follow(average, model, min(_EMA, (step + 1) / (step + 10)))
        losses.append(float(loss.detach()))
        if (step + 1) % _SHOWN == 0:
            seconds = time.monotonic() - began
            states = {name: part.state_dict() for name, part in parts.items()}
            written = checkpoint.with_suffix(".part")
            torch.save({"step": step + 1, **states}, written)
            written.replace(checkpoint)
            print(f"step {step + 1} of {steps}: loss {np.mean(losses[-_SHOWN:]):.3f}, {seconds:.0f} s", file=sys.stderr)
    return average.state_dict()


def _follow(average: nn.Module, model: nn.Module, share: float) -> None:
    with torch.no_grad():
        for kept, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, 1 - share)
            else:
                kept.copy_(new)


@cache
def _scenes() -> list[Scene]:
    return [scene(number) for number in range(TRAINING)]


def _batch(random: np.random.Generator) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return images, corners of boxes and classes of random scenes, mirrored, turned and with colors exchanged."""
    images, boxes, labels = [], [], []
    for at in random.integers(TRAINING, size=_BATCH):
        made = _scenes()[at]
        image, corners = made.image, np.concatenate([made.boxes[:, :2], made.boxes[:, :2] + made.boxes[:, 2:]], -1)
        side = len(image)
        if random.random() < 0.5:
            image, corners = (
                image[:, ::-1],
                np.stack([side - corners[:, 2], corners[:, 1], side - corners[:, 0], corners[:, 3]], -1),
            )
        if random.random() < 0.5:
            image, corners = image.transpose(1, 0, 2), corners[:, [1, 0, 3, 2]]
        image = image[..., random.permutation(3)]
        images.append(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))))
        boxes.append(torch.from_numpy(corners).float())
        labels.append(torch.from_numpy(made.labels))
    return torch.stack(images).float() / 255, boxes, labels


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("names", nargs="+", choices=[*DETECTORS])
    parser.add_argument("--steps", type=int, help="instead of the detector's own number")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names:
        trained(name, arguments.steps)
