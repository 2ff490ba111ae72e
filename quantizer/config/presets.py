"""The presets: values for keys of the ``quantizer`` section that a configuration does not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from typing import Literal

__all__ = ["DEFAULT", "PRESETS", "preset_keys", "with_preset"]

_BY_OUTPUT = {"calibrator": "output", "smooth": "auto", "zero_point": True}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One range for each tensor, from one pass over the data.
    "fast": {
        "activations": {"calibrator": "percentile", "percentile": 99.99, "smooth": None, "zero_point": False},
        "weights": {"rounding": "nearest"},
        "bias_correction": False,
    },
    "balanced": {"activations": _BY_OUTPUT, "weights": {"rounding": "nearest"}, "bias_correction": True},
    "accurate": {"activations": _BY_OUTPUT, "weights": {"rounding": "gptq"}, "bias_correction": True},
}
"""The values of keys, or of the keys of a section; a key that is not named here has the default of the schema."""

DEFAULT: Literal["balanced"] = "balanced"

_TOGETHER = {"calibrator": ("calibrator", "percentile"), "percentile": ("calibrator", "percentile")}
"""Keys with a meaning together: who sets one of them sets all."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``quantizer`` section with those of its preset for all keys that are not set.

    Values of a wrong type stay as they are, for the validation to reject.
    """
    found = dict(values)
    preset = found.get("preset", DEFAULT)
    for name, wanted in PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        if not isinstance(wanted, Mapping):
            found.setdefault(name, wanted)
            continue
        given = found.get(name, {})
        if isinstance(given, Mapping):
            free = {key: value for key, value in wanted.items() if not set(_TOGETHER.get(key, (key,))) & set(given)}
            found[name] = {**free, **given}
    return found


def preset_keys(section: str) -> frozenset[str]:
    """Return the keys of a section of the ``quantizer`` section, or of itself, that some preset sets."""
    named = (preset if section == "quantizer" else preset.get(section, {}) for preset in PRESETS.values())
    return frozenset(key for keys in named for key, value in keys.items() if not isinstance(value, Mapping))
