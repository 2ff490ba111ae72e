"""The layouts in ``deliver`` that a run can write: which backends and tasks have them, and with which ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantizer.plan.targets import AUTO, profile, profiles
from quantizer.plan.targets.clients import OF_ANY_BACKEND, OF_MODULES, Layout

if TYPE_CHECKING:
    from quantizer.config.quantizer_section import QuantizerConfig
    from quantizer.config.schema import RunConfig

LAYOUTS = tuple(
    dict.fromkeys([*(layout for name in profiles if name != AUTO for layout in profile(name).layouts), *OF_ANY_BACKEND])
)
"""The layouts of all backends."""


_ALPHA = "smoothquant_alpha"


def layout_of(layout: str, backend: str) -> Layout | None:
    """Return what a layout holds for a backend; None if it does not exist for it."""
    return OF_ANY_BACKEND.get(layout) or profile(backend).layouts.get(layout)


def backends_of(layouts: Sequence[str]) -> list[str]:
    """Return the backends that write all of these layouts, without variants for certain CPUs."""
    variants = {profile(name).exact_variant for name in profiles if name != AUTO}
    names = [name for name in profiles if name != AUTO and name not in variants]
    return [name for name in names if all(layout_of(layout, name) is not None for layout in layouts)]


def needs_static(config: RunConfig) -> bool:
    """Return whether a layout of a run has no ranges at run time."""
    profiles_of_layouts = [profile(name).layouts for name in profiles if name != AUTO]
    return any(name in known and known[name].static for name in config.deliver for known in profiles_of_layouts)


def without_factors(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a run with SmoothQuant left out of the preset, if a layout has no factors for it.

    Values that configure SmoothQuant are returned themselves. Values of a wrong type stay unchanged for the validation
    to reject.
    """
    deliver, quantizer = values.get("deliver"), values.get("quantizer", {})
    if not isinstance(deliver, list | tuple) or not isinstance(quantizer, Mapping):
        return values
    activations = quantizer.get("activations", {})
    if not set(OF_ANY_BACKEND) & {name for name in deliver if isinstance(name, str)}:
        return values
    if not isinstance(activations, Mapping) or _ALPHA in activations:
        return values
    return {**values, "quantizer": {**quantizer, "activations": {**activations, _ALPHA: None}}}


def forget_alpha(config: RunConfig) -> None:
    """Remove the field that ``without_factors`` added from the fields that the user set."""
    config.quantizer.activations.model_fields_set.discard(_ALPHA)


def left_out(config: RunConfig) -> str | None:
    """Return a note on SmoothQuant, which is left out of the preset for a layout; None if nothing is left out."""
    layouts = [name for name in config.deliver if name in OF_ANY_BACKEND]
    of_preset = type(config.quantizer)(preset=config.quantizer.preset).activations.smoothquant_alpha
    if not layouts or of_preset is None or _ALPHA in config.quantizer.activations.model_fields_set:
        return None
    return (
        f"SmoothQuant is left out, in the engine too, because the format of {layouts[0]} has no factors for it; to "
        "keep SmoothQuant in the engine, convert in a run of its own without this layout"
    )


def layout_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the layouts in ``deliver`` with the backend, the task and the ranges of a run."""
    for layout in config.deliver:
        if layout in OF_MODULES and config.model.task is not None:
            yield (
                f"deliver: {layout!r} is for a model of {layout} that a function returns, and for "
                "QuantizedModel.save(..., deliver=[...]); remove it"
            )
        elif layout in LAYOUTS:
            yield from _problems(layout, config.model.task, config.quantizer)
        if layout in OF_ANY_BACKEND and not config.quantize:
            yield f"deliver: {layout!r} holds a quantized model, but quantize is false; remove it"


def _problems(layout: str, task: str | None, settings: QuantizerConfig) -> Iterator[str]:
    key = f"deliver: {layout!r}"
    if settings.backend == AUTO and not settings.candidates and layout not in OF_ANY_BACKEND:
        written = ", ".join(backends_of([layout]))
        yield f"{key} does not exist for every backend of {AUTO!r}; expected quantizer.backend: [{written}]"
        return
    ranges = (settings.activations.ranges, *(rule.activations for rule in settings.formats))
    for backend in settings.candidates or (settings.backend,):
        known = layout_of(layout, backend)
        if known is None:
            yield f"{key} does not exist for backend {backend}; expected {' or '.join(backends_of([layout]))}"
            continue
        if known.classes and task is not None and task not in known.classes:
            yield (
                f"{key} has no class for task {task!r} with backend {backend}; remove it, or use one of the tasks "
                f"{', '.join(known.classes)}"
            )
        if known.static and "dynamic" in ranges:
            yield f"{key} needs ranges from calibration, but activations are 'dynamic'; remove one of the two"
