"""Checkpoints that timm saves, which transformers loads through its wrapper where timm is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantizer.errors import MissingDependencyError

_KIND = "timm_wrapper"
_CLASSIFIER = "TimmWrapperForImageClassification"
_GIVEN = ("num_classes", "pretrained")
"""The arguments of a timm model that the wrapper gives itself."""


def require_timm(told: Mapping[str, Any]) -> None:
    """Raise if a config is one of timm, and timm or the torchvision of its images is missing.

    Raises:
        MissingDependencyError: a package is not installed.
    """
    if told.get("pretrained_cfg") is None and told.get("model_type") != _KIND:
        return
    for package in ("timm", "torchvision"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "timm")


def classifier_of(config: Any) -> str | None:
    """Return the class of transformers for a checkpoint of timm, which names none; None: it is no classifier of it."""
    return _CLASSIFIER if config.model_type == _KIND and config.num_labels else None


def loadable(config: Any) -> Any:
    """Return a config with which a model loads: timm also saves arguments that the wrapper gives itself."""
    if config.model_type == _KIND and config.model_args:
        config.model_args = {name: value for name, value in config.model_args.items() if name not in _GIVEN}
    return config


def save_processor(processor: Any, config: Any, folder: Path) -> None:
    """Save a tokenizer, an image processor or a feature extractor; that of timm is in its model's config."""
    if getattr(config, "model_type", None) == _KIND:
        config.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
