"""The stages of an earlier run of the same work, whose times tell how long this one takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.config import RunConfig
from quantizer.report import Stage
from quantizer.runs.progress.stage_timer import earlier_stages

_WORK = ("model", "quantize", "data", "amp", "fallback", "qat")
"""The sections that tell what a run does."""


def earlier_run(config: RunConfig, folder: Path, *, chooses: bool) -> list[Stage]:
    """Return the stages of the last run that did the same work, in a folder or beside it; none if there is none.

    It had the same model and rows, searched and trained the same, and chose its engine, too, or had the same backend.
    """
    wanted = config.model_dump(mode="json")

    def same(report: Mapping[str, Any]) -> bool:
        told, settings = report["config"], report["config"]["quantizer"]
        backend = chooses or settings["backend"] == config.quantizer.backend
        choice = (report["choice"] is not None) is chooses and backend
        same_preset = settings["preset"] == config.quantizer.preset
        return choice and same_preset and all(told[section] == wanted[section] for section in _WORK)

    return earlier_stages(folder, "report.json", same)
