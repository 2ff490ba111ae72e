"""The presets: values for keys of the ``quantizer`` section that a configuration does not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from typing import Literal

__all__ = ["DEFAULT", "PRESETS", "preset_keys", "with_preset"]

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # One range for each tensor, from one pass over the data.
    "fast": {"activations": {"calibrator": "percentile", "percentile": 99.99, "smooth": None, "zero_point": False}},
    "balanced": {"activations": {"calibrator": "output", "smooth": "auto", "zero_point": True}},
}
"""The values by section and key; a key that a preset does not name has the default of the schema."""

DEFAULT: Literal["balanced"] = "balanced"

_TOGETHER = {"calibrator": ("calibrator", "percentile"), "percentile": ("calibrator", "percentile")}
"""Keys with a meaning together: who sets one of them sets all."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``quantizer`` section with those of its preset for all keys that are not set.

    Values of a wrong type stay as they are, for the validation to reject.
    """
    found = dict(values)
    preset = found.get("preset", DEFAULT)
    for name, keys in PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        given = found.get(name, {})
        if isinstance(given, Mapping):
            free = {key: value for key, value in keys.items() if not set(_TOGETHER.get(key, (key,))) & set(given)}
            found[name] = {**free, **given}
    return found


def preset_keys(section: str) -> frozenset[str]:
    """Return the keys of a section that some preset sets."""
    return frozenset(key for preset in PRESETS.values() for key in preset.get(section, {}))
