"""Trial builds of engines in the process of the tests: one of its own takes a second to start, for each engine."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any
from unittest import mock

from quantizer.engines import measure
from quantizer.engines.measure import in_own_process

_SHORT_S = 1.0


@contextmanager
def trials_here() -> Iterator[None]:
    """Build and run engines here, and again in a process of its own where that fails or has little time.

    Only then does the process of a run start: it would import its libraries at once.
    """
    in_own_process = mock.patch.object(measure, "in_own_process", _here)
    with in_own_process, mock.patch.object(measure, "begin_in_own_process"), mock.patch.object(measure.Worker, "tell"):
        yield


def _here(task: str, backend: str, words: Sequence[Any], *, doing: str, timeout_s: float) -> Any:
    if task == "trial" and timeout_s > _SHORT_S:
        with suppress(Exception), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return measure.carried_out(measure._request(task, backend, words))
    return in_own_process(task, backend, words, doing=doing, timeout_s=timeout_s)
