"""The packages that a task, its score and an export need, besides those of engine and report."""

from __future__ import annotations

from functools import partial

from quantizer.runs.preflight.faults import Faults, require_package
from quantizer.tasks import tasks

_EXPORT = ("onnx", "onnxscript", "onnx_ir")


def check_packages(faults: Faults, task: str | None) -> None:
    """Check the packages of the extras ``hf`` and ``onnx`` that a checkpoint needs, without importing them."""
    used = None if task is None else tasks[task]
    scored = () if used is None else (*used.packages, *(("PIL",) if used.reads == "image" else ()))
    for package in ("transformers", *scored):
        faults.of(partial(require_package, package, "hf"))
    check_export_packages(faults)


def check_export_packages(faults: Faults) -> None:
    """Check the packages of the extra ``onnx``, without importing them."""
    for package in _EXPORT:
        faults.of(partial(require_package, package, "onnx"))
