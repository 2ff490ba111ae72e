"""Long build in another thread: progress from its phases, and an end soon after Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from quantizer.engines.base import Progress

T = TypeVar("T")

_POLL_S = 0.05


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildMonitor:
    """Progress of a builder's phases; written by the builder's thread, read by the waiting one.

    Attributes:
        latest: the share that is done, in [0, 1] and never falling, and the name of the phase that moved last. One
            tuple, replaced as a whole, so that a reader needs no lock.
        cancelled: if set, the builder stops at its next step.
    """

    def __init__(self) -> None:
        self.latest: tuple[float, str] = (0.0, "start")
        self.cancelled = False
        self._phases: dict[str, _Phase] = {}

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase of ``steps`` steps inside the current step of ``parent``."""
        self._phases[name] = _Phase(parent, max(steps, 1))
        self._update(name)

    def step_complete(self, name: str, step: int) -> bool:
        """Count step ``step`` of a phase, from 0, as done; return False to stop the builder."""
        if name in self._phases:
            phase = self._phases[name]
            phase.done = max(phase.done, min(step + 1, phase.steps))
            self._update(name)
        return not self.cancelled

    def phase_finish(self, name: str) -> None:
        """End a phase, whether all of its steps are done or not."""
        if name in self._phases:
            self._phases[name].done = self._phases[name].steps
            self._update(name)
            del self._phases[name]

    def _update(self, name: str) -> None:
        roots = [phase for phase, state in self._phases.items() if state.parent not in self._phases]
        share = max((self._share(root) for root in roots), default=0.0)
        self.latest = (max(self.latest[0], min(share, 1.0)), name)

    def _share(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._share(child) for child, state in self._phases.items() if state.parent == name), default=0.0)
        return min(phase.done + inner, phase.steps) / phase.steps


def trt_monitor(trt: Any, state: BuildMonitor) -> Any:
    """Return ``state`` as an ``IProgressMonitor`` of the module ``trt``, whose class only exists after its import."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            state.phase_start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            return state.step_complete(name, step)

        def phase_finish(self, name: str) -> None:
            state.phase_finish(name)

    return Monitor()


def run_monitored(build: Callable[[], T], state: BuildMonitor, progress: Progress | None) -> T:
    """Run ``build`` in a thread and wait for it here, reporting the progress of ``state`` to ``progress``.

    A builder that holds this thread in native code would delay Ctrl-C until its end. After an exception here, Ctrl-C or
    one of ``progress``, the builder is asked to stop and waited for, and the exception is raised again; a second Ctrl-C
    does not wait.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    # Not Thread.join: if Ctrl-C interrupts it, the thread is marked as ended while it still runs (CPython 3.11).
    finished = threading.Event()

    def work() -> None:
        try:
            results.append(build())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=work, name="engine build", daemon=True).start()
    try:
        told: tuple[float, str] | None = None
        while not finished.wait(_POLL_S):
            if progress and state.latest != told:
                told = state.latest
                progress(*told)
    except BaseException:
        state.cancelled = True
        finished.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]
