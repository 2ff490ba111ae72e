"""The stages of a conversion, told from its request before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantizer.engines import runs_here
from quantizer.report import Stage
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.progress.stage_timer import Outlook, earlier_stages
from quantizer.targets import profile


def conversion_outlook(asked: ConversionRequest, facts: ConversionInputs, folder: Path) -> Outlook:
    """Return the stages of a conversion into a folder, with the times of an earlier one of the same model."""
    return Outlook(list(conversion_stages(asked)), earlier_conversion(asked, facts, folder))


def earlier_conversion(asked: ConversionRequest, facts: ConversionInputs, folder: Path) -> list[Stage]:
    """Return the stages of the last conversion of the same model for the same backends; none if there is none."""
    wanted = asdict(facts) | {"name": None}
    backends = None if asked.chooses else set(asked.backends)

    def same(report: Mapping[str, Any]) -> bool:
        if report["model"] | {"name": None} != wanted or (report["choice"] is not None) != asked.chooses:
            return False
        made = report["backends"]
        quantized = any(one["quantization"] is not None for one in made)
        alike = asked.chooses or quantized == asked.quantization
        return alike and (backends is None or {one["backend"] for one in made} == backends)

    return earlier_stages(folder, "conversion.json", same)


def conversion_stages(asked: ConversionRequest) -> Iterator[str]:
    """Yield the names of the stages, in order."""
    yield "load the model"
    if asked.quantization:
        yield "calibrate"
    if asked.chooses:
        yield from ("choose the engine", "measure latency")
        if asked.quantization:
            yield from (*(("score the proxy",) if asked.evaluation is not None else ()), "inspect the engine")
        return
    exported: set[tuple[str, int]] = set()
    scored = False
    for name in asked.backends:
        kind = (profile(name).float_dtype, profile(name).opset)
        yield from _of_backend(asked, runs_here(name), kind not in exported)
        if asked.evaluation is not None and runs_here(name):
            forms = ("proxy", "engine") if asked.quantization else ("engine",)
            yield from (f"score the {form}" for form in (*(() if scored else ("float",)), *forms))
            scored = True
        if asked.quantization:
            # What runs here was compared when it was checked.
            yield from (*(() if runs_here(name) else ("compare the outputs",)), "inspect the engine")
        exported.add(kind)


def _of_backend(asked: ConversionRequest, here: bool, exports_float: bool) -> Iterator[str]:
    """Yield the stages of one backend until it is scored; ``here``: its engines run on this machine."""
    made = ("quantize", "export", "build the engine") if asked.quantization else ("export", "build the engine")
    yield from made
    if asked.quantization and here:
        yield from (*(("export the float model",) if exports_float else ()), "build the engine", "time the groups")
    if asked.max_drop is not None:
        yield from ("measure sensitivity", "search what goes back to float", *made)
        if here:
            yield "check the engine on rows that the search did not see"
    if here:
        yield from ("check the outputs against PyTorch", "measure latency")
