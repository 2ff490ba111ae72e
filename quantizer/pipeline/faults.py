"""Faults of several checks, collected: all of them are told at once, and what is not installed in one line of pip.

The packages that a task, its score and an export need, besides those of engine and report.

Checks of a loaded model with its samples, and of what export, build and report need, before the model first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from quantizer.engines import BuildOptions, backend
from quantizer.errors import ConfigError, MissingDependencyError, QuantizerError, install_command
from quantizer.export.exporter import require_exporter
from quantizer.report import require_html
from quantizer.tasks import Example, Sample, Task, tasks

T = TypeVar("T")


class Looks:
    """Data and checkpoints that the checks of several runs read: each is read once; its error is raised each time."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, QuantizerError | None]] = {}

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return what ``read`` returns, or returned before for this key."""
        if key not in self._found:
            try:
                self._found[key] = (read(), None)
            except QuantizerError as error:
                self._found[key] = (None, error)
        value, fault = self._found[key]
        if fault is not None:
            raise fault
        found: T = value
        return found


class Faults:
    """The errors that checks raised, in the order of the checks."""

    def __init__(self) -> None:
        self._found: list[QuantizerError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return what a check returns; None if it raises, and the error is kept."""
        try:
            return check()
        except QuantizerError as error:
            self._found.append(error)
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Return whether a check passes; if it raises, the error is kept."""
        before = len(self._found)
        self.of(check)
        return len(self._found) == before

    def raise_all(self, what: str) -> None:
        """Raise if a check found a fault: its own error if there is one alone, or one with all of them."""
        texts = self.texts
        if len(self._found) == 1:
            raise self._found[0]
        if len(texts) == 1:
            raise QuantizerError(texts[0])
        if texts:
            raise QuantizerError(f"{what}, for {len(texts)} reasons:\n" + "\n".join(f"  - {text}" for text in texts))

    @property
    def texts(self) -> list[str]:
        """All faults in words, each once."""
        return list(dict.fromkeys(self._texts()))

    def _texts(self) -> Iterable[str]:
        missing = {error.package: error.extra for error in self._found if isinstance(error, MissingDependencyError)}
        if missing:
            extras = ",".join(dict.fromkeys(missing.values()))
            verb = "is" if len(missing) == 1 else "are"
            yield f"{', '.join(missing)} {verb} not installed: run  {install_command(extras)}"
        for error in self._found:
            if isinstance(error, ConfigError):
                yield from error.problems
            elif not isinstance(error, MissingDependencyError):
                yield str(error)


def require_package(package: str, extra: str) -> None:
    """Raise if a package is not installed, without importing it."""
    if find_spec(package) is None:
        raise MissingDependencyError(package, extra)


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


def require_tools(builds: Mapping[str, BuildOptions], *, html: bool) -> None:
    """Check the packages and libraries that export, build and report need."""
    require_exporter()
    for name, options in builds.items():
        backend(name).check(options)
    if html:
        require_html()


def check_examples(task: Task, scored: Sequence[Example], others: Sequence[Example | Sample] = ()) -> None:
    """Check samples without running the model."""
    if scored:
        task.targets(scored)
    task.inputs.check(task.all_samples([*scored, *others]))
