"""The registries of names in a configuration, usable before the modules that fill them are imported with torch.

``calibrators`` and ``tasks`` export them under their own names, with their types.
"""

from __future__ import annotations

from typing import Any

from quantizer.common.registry import Registry

CALIBRATORS: Registry[Any] = Registry(
    "calibrator", ("percentile", "max", "mse", "entropy"), reserved=("auto", "output")
)
"""``auto`` and ``output`` are no estimates of their own: they compare the others."""

TASKS: Registry[Any] = Registry(
    "task",
    (
        "sentence-similarity",
        "embedding-classification",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "multiple-choice",
        # Before fill-mask: transformers lists BART for both, and it writes text.
        "text-to-text",
        "fill-mask",
        "text-generation",
        "text-generation-with-past",
        "image-classification",
        "zero-shot-image-classification",
        "semantic-segmentation",
        "depth-estimation",
        "object-detection",
        "audio-classification",
        "automatic-speech-recognition",
        "speech-to-text",
    ),
)
