"""Every error that quantizer raises on purpose.

    QuantizerError
    ├── ConfigError              a YAML file, mapping or keyword that is wrong (all problems at once)
    ├── SourceError              source that cannot be read, or a rewrite that does not hold
    ├── ProxyError               a model or proxy used in a way it cannot be
    ├── CalibrationError         calibration data, or a step that needs calibration first
    ├── SensitivityError         amp() or fallback() asked for something impossible
    ├── TrainingError            a training that cannot begin, go on or be resumed
    ├── ExportError              a model that cannot be written as Q/DQ ONNX
    ├── EngineError              an engine that does not build, load or run
    ├── TaskError                a model, data set or metric that a run names
    └── MissingDependencyError   an optional package is not installed

A message says what was wrong and where, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CalibrationError",
    "ConfigError",
    "EngineError",
    "ExportError",
    "MissingDependencyError",
    "ProxyError",
    "QuantizerError",
    "SensitivityError",
    "SourceError",
    "TaskError",
    "TrainingError",
]


class QuantizerError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(QuantizerError):
    """One or more problems in a configuration.

    Args:
        problems: one line per problem; all that were found, not only the first.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class SourceError(QuantizerError):
    """Source text cannot be read, parsed or rewritten."""


class ProxyError(QuantizerError):
    """A model or proxy is used in a way it cannot be."""


class CalibrationError(QuantizerError):
    """Calibration data is unusable, or a step needs calibration first."""


class SensitivityError(QuantizerError):
    """``amp()`` or ``fallback()`` was asked for something impossible."""


class TrainingError(QuantizerError):
    """A training cannot begin, go on or be resumed, or came to nothing."""


class ExportError(QuantizerError):
    """A model cannot be written as Q/DQ ONNX."""


class EngineError(QuantizerError):
    """An engine does not build, load or run."""


class TaskError(QuantizerError):
    """A model, data set or metric named by a run cannot be had."""


class MissingDependencyError(QuantizerError):
    """An optional package is not installed.

    Args:
        package: the module that could not be imported.
        extra: the extra of this distribution that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{package!r} is not installed: run  pip install 'quantizer[{extra}]'")
