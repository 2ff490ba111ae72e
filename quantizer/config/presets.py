"""Values for keys that a configuration does not set: presets, and sizes that fit those of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

_BY_OUTPUT = {"calibrator": "output", "smooth": "auto", "zero_point": True}

_AS_THEY_ARE = {"weights": {"rounding": "nearest"}, "bias_correction": False}
"""Weights and biases, where nothing is searched for."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "plain": {
        "activations": {"calibrator": "percentile", "percentile": 99.99, "smooth": None, "zero_point": False},
        **_AS_THEY_ARE,
    },
    # What is smoothed needs no clipping.
    "fast": {"activations": {"calibrator": "max", "smooth": 0.8, "zero_point": True}, **_AS_THEY_ARE},
    "balanced": {"activations": _BY_OUTPUT, "weights": {"rounding": "nearest"}, "bias_correction": True},
    "accurate": {"activations": _BY_OUTPUT, "weights": {"rounding": "gptq"}, "bias_correction": True},
}
"""The values of keys of the ``quantizer`` section, or of the keys of a section in it; a key that is not named here has
the default of the schema."""

DEFAULT: Literal["balanced"] = "balanced"

_TOGETHER = {"calibrator": ("calibrator", "percentile"), "percentile": ("calibrator", "percentile")}
"""Keys with a meaning together: who sets one of them sets all."""

_READ = {"batch": ("data", "batch_size"), "sequence": ("model", "max_length")}
"""The key of what is read at once, by the axis of ``export.dynamic`` that must take it."""


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


def with_fitted_sizes(values: Mapping[str, Any], defaults: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Return the values of a run in which sizes that are not set fit the ranges of ``export.dynamic`` that are.

    A default that is too large becomes the largest size of the range; that of a measured latency, if it is too small,
    too, becomes the usual size. Values of a wrong type stay as they are, for the validation to reject.

    Args:
        values: the sections of a run.
        defaults: the default of each size, by section and key.
    """
    found = dict(values)
    model = _section(values, "model")
    if model is None or model.get("task") is None:
        # The batches of a function have the sizes that they have.
        return found
    dynamic = _section(_section(values, "export") or {}, "dynamic") or {}
    for axis, read in _READ.items():
        sizes = dynamic.get(axis)
        if not isinstance(sizes, list | tuple) or [type(size) for size in sizes] != [int] * 3:
            continue
        low, usual, high = sizes
        for place, least, other in ((read, 0, high), (("report", f"latency_{axis}"), low, usual)):
            section = _section(found, place[0])
            if section is not None and not least <= defaults[place] <= high:
                found[place[0]] = {place[1]: other, **section}
    return found


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return a section, an empty one if there is none; None: it is something else."""
    section = values.get(name, {})
    return section if isinstance(section, Mapping) else None
