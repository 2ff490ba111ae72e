"""A limit on the layers that a checkpoint's config may ask for: building too many would not end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MOST_LAYERS = 2_000
_COUNTS = re.compile("layer|depth")


def require_depth(told: Mapping[str, Any]) -> None:
    """Raise if a config asks for more layers than can be built in reasonable time.

    A model is built before its weights are read, so that missing weights would be noticed too late.

    Raises:
        ValueError: a key asks for more than 2,000 layers; the message names it.
    """
    for key, value in told.items():
        if isinstance(value, dict):
            require_depth(value)
        counts = value if isinstance(value, list) else [value]
        if _COUNTS.search(key) and any(isinstance(count, int) and count > _MOST_LAYERS for count in counts):
            raise ValueError(f"{key} is {value}, expected at most {_MOST_LAYERS} layers")
