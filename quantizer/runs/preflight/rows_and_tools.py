"""Checks of a loaded model with its rows, and of what export, build and report need, before the model first runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantizer.engines import BuildOptions, backend
from quantizer.export import require_exporter
from quantizer.report import require_html
from quantizer.tasks import Row, Sample, Task


def require_tools(builds: Mapping[str, BuildOptions], *, html: bool) -> None:
    """Check the packages and libraries that export, build and report need."""
    require_exporter()
    for name, options in builds.items():
        backend(name).check(options)
    if html:
        require_html()


def check_rows(task: Task, scored: Sequence[Row], others: Sequence[Row | Sample] = ()) -> None:
    """Check rows without running the model."""
    if scored:
        task.targets(scored)
    task.inputs.check(task.all_samples([*scored, *others]))
