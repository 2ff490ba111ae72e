"""Heads of checkpoints: what a model reads, and the task that its architecture is for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from quantizer.tasks.task import tasks

_MAPPINGS = {"AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"}
"""Names of mappings that are not those of their class."""


def read_by(config: Any) -> tuple[str, ...]:
    """Return what a model of this config can read, some or none of "text", "image" and "audio"."""
    heads = {reads: _has_head(config.model_type, reads) for reads in ("text", "image", "audio")}
    # Some image models are pretrained on visual tokens, and their config has a vocabulary of these; models of speech
    # have one of letters.
    others = tuple(reads for reads in ("image", "audio") if heads[reads])
    text = (heads["text"] or not others) and getattr(config, "vocab_size", None) is not None
    return (("text",) if text else ()) + others


def _has_head(model_type: str, reads: str) -> bool:
    """Return whether transformers has a class of this model type for a task that reads texts, images or recordings."""
    classes = {tasks[name].auto_class for name in tasks if tasks[name].reads == reads}
    return any(_architectures(one, model_type) for one in classes - {"AutoModel"})


def task_of(architecture: str | None, model_type: str, reads: Sequence[str]) -> str | None:
    """Return the task whose transformers class builds this architecture, but no task with a head of its own."""
    # The package's own tasks come first, so they win over others that are registered for the same class.
    for task in tasks:
        fits = tasks[task].reads in reads and not tasks[task].needs_head
        if fits and architecture in _architectures(tasks[task].auto_class, model_type):
            return task
    return None


def _architectures(auto_class: str, model_type: str) -> tuple[str, ...]:
    """Return the classes that an auto class builds for a model type: "AutoModelForCTC" by ``MODEL_FOR_CTC_...``."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]*|[0-9]", auto_class.removeprefix("Auto"))
    mapping = _MAPPINGS.get(auto_class, "_".join(words).upper())
    names = getattr(_auto(), f"{mapping}_MAPPING_NAMES", {})
    made = names.get(model_type, ())
    return (made,) if isinstance(made, str) else tuple(made)


def _auto() -> Any:
    """Return the module that maps model types to the classes of transformers."""
    return importlib.import_module("transformers.models.auto.modeling_auto")
