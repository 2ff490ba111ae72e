"""The registries whose names a configuration holds, before the modules are imported that fill them: those take torch.

``calibrators`` and ``tasks`` give them out under their own names, with their types.
"""

from __future__ import annotations

from typing import Any

from quantizer.common.registry import Registry

__all__ = ["CALIBRATORS", "TASKS"]

CALIBRATORS: Registry[Any] = Registry("calibrator", ("percentile", "max", "mse", "entropy"), reserved=("auto",))
"""``auto`` is no estimate: it tries the others."""

TASKS: Registry[Any] = Registry(
    "task", ("sentence-similarity", "embedding-classification", "sequence-classification", "image-classification")
)
