"""Checks before a model is loaded: collected errors, cached reads, and required packages.

All errors are reported at once, and all missing packages in one pip command.
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


class ReadCache:
    """Cache of data and checkpoints that several checks read; a failed read raises the same error each time."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, QuantizerError | None]] = {}

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return the result of ``read``, cached by key."""
        if key not in self._found:
            try:
                self._found[key] = (read(), None)
            except QuantizerError as error:
                self._found[key] = (None, error)
        value, fault = self._found[key]
        if fault is not None:
            raise fault
        result: T = value
        return result


class Faults:
    """The errors of several checks, in order."""

    def __init__(self) -> None:
        self._found: list[QuantizerError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return the result of a check; if it raises, keep the error and return None."""
        try:
            return check()
        except QuantizerError as error:
            self._found.append(error)
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Return whether a check passes; if it raises, keep the error."""
        before = len(self._found)
        self.of(check)
        return len(self._found) == before

    def raise_all(self, failure: str) -> None:
        """Raise all kept errors as one; do nothing if every check passed."""
        texts = self.texts
        if len(self._found) == 1:
            raise self._found[0]
        if len(texts) == 1:
            raise QuantizerError(texts[0])
        if texts:
            raise QuantizerError(f"{failure}, for {len(texts)} reasons:\n" + "\n".join(f"  - {text}" for text in texts))

    @property
    def texts(self) -> list[str]:
        """All error texts without duplicates."""
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
    """Raise if a package is not installed; the package is not imported."""
    if find_spec(package) is None:
        raise MissingDependencyError(package, extra)


_EXPORT = ("onnx", "onnxscript", "onnx_ir")


def check_packages(faults: Faults, task: str | None) -> None:
    """Check the packages of the extras ``hf`` and ``onnx`` that a checkpoint needs."""
    task_class = None if task is None else tasks[task]
    scored = () if task_class is None else (*task_class.packages, *(("PIL",) if task_class.reads == "image" else ()))
    for package in ("transformers", *scored):
        faults.of(partial(require_package, package, "hf"))
    check_export_packages(faults)


def check_export_packages(faults: Faults) -> None:
    """Check the packages of the extra ``onnx``."""
    for package in _EXPORT:
        faults.of(partial(require_package, package, "onnx"))


def require_tools(builds: Mapping[str, BuildOptions], *, html: bool) -> None:
    """Raise if export, build or report lack a package or library."""
    require_exporter()
    for name, options in builds.items():
        backend(name).check(options)
    if html:
        require_html()


def check_examples(task: Task, scored: Sequence[Example], others: Sequence[Example | Sample] = ()) -> None:
    """Raise if samples do not fit the task; the model does not run."""
    if scored:
        task.targets(scored)
    task.inputs.check(task.all_samples([*scored, *others]))
