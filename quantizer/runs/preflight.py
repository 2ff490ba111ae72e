"""Checks before the first pass of a model: packages, targets, rows and labels."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

from quantizer.engines import BuildOptions
from quantizer.engines import backend
from quantizer.export import require_exporter
from quantizer.report import require_html
from quantizer.tasks import Row
from quantizer.tasks import Sample
from quantizer.tasks import Task

__all__ = ["check_rows", "require_tools"]


def require_tools(builds: Mapping[str, BuildOptions], *, html: bool) -> None:
    """Look for what exporting, building and reporting need.

    Args:
        builds: how to build, by backend.
        html: a page is written at the end.

    Raises:
        MissingDependencyError: a package is not installed.
        EngineError: a library does not load, or cannot build what is asked for on this machine.
    """
    require_exporter()
    for name, options in builds.items():
        backend(name).check(options)
    if html:
        require_html()


def check_rows(task: Task, scored: Sequence[Row], others: Sequence[Row | Sample] = ()) -> None:
    """Look at rows without running anything.

    Args:
        task: what they are for.
        scored: those with labels that a score is taken on.
        others: those of which the labels do not count.

    Raises:
        TaskError: rows of another kind, a label that the model has no class for, or a file that cannot be opened.
    """
    if scored:
        task.targets(scored)
    samples = [row for row in others if isinstance(row, Sample)]
    samples += task.samples([row for row in (*scored, *others) if not isinstance(row, Sample)])
    task.inputs.check(samples)
