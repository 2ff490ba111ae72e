"""Trial builds of engines in the process of the tests: one of its own takes a second to start, for each engine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from quantizer.engines import measure
from quantizer.engines.backends import backend as registered
from quantizer.engines.measure import in_own_process

_SHORT_S = 1.0


@contextmanager
def trials_here() -> Iterator[None]:
    """Build and run engines here, and again in a process of its own where that fails or has little time."""
    with mock.patch.object(measure, "in_own_process", _here):
        yield


def _here(task: str, backend: str, words: Sequence[object], *, doing: str, timeout_s: float) -> Any:
    printed = io.StringIO()
    if task == "trial" and timeout_s > _SHORT_S:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            code = measure.main([task, type(registered(backend)).__module__, backend, *map(str, words)])
        if code == 0:
            return json.loads(printed.getvalue().splitlines()[-1])
    return in_own_process(task, backend, words, doing=doing, timeout_s=timeout_s)
