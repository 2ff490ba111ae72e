"""A checkpoint's config that asks for more layers than any model has: building them would not end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["require_depth"]

_MOST_LAYERS = 2_000
_COUNTS = re.compile("layer|depth")


def require_depth(told: Mapping[str, Any]) -> None:
    """Raise where a config counts more layers than can be built in the time that anybody waits.

    Models are built before their weights are looked at, and those of such a config fit no file.

    Raises:
        ValueError: it does; the message names the key.
    """
    for key, value in told.items():
        if isinstance(value, dict):
            require_depth(value)
        counts = value if isinstance(value, list) else [value]
        if _COUNTS.search(key) and any(isinstance(count, int) and count > _MOST_LAYERS for count in counts):
            raise ValueError(f"{key} is {value}, expected at most {_MOST_LAYERS} layers")
