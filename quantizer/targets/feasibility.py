"""Checks of an engine's options against its target: problems, and the settings that cause them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from quantizer.targets.base import TargetProfile


class Problem(NamedTuple):
    """A problem, and the setting that causes it: a key of a configuration or an option of a command."""

    place: str
    text: str


def engine_problems(
    targets: Sequence[TargetProfile],
    *,
    formats: Set[str] = frozenset(),
    capabilities: Sequence[str] = (),
    precision: str | None = None,
    strip_weights: bool = False,
) -> Iterator[Problem]:
    """Yield the options that targets do not support."""
    for capability in capabilities:
        for target in targets:
            if (reason := target.capability_reason(capability, formats)) is not None:
                yield Problem("compute_capability", reason)
    if precision is not None and targets:
        reasons = [target.precision_reason(precision) for target in targets]
        # The setting applies to the targets that support it; others compute in the types of their files.
        if None not in reasons:
            yield Problem("inference_precision", str(reasons[0]))
    if strip_weights:
        for target in targets:
            if (reason := target.stripping_reason()) is not None:
                yield Problem("strip_weights", reason)
