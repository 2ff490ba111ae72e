"""The exception classes of this package.

    QuantizerError
    ├── ConfigError              a wrong YAML file, mapping or keyword (all problems at once)
    ├── SourceError              source that cannot be read, parsed or rewritten
    ├── ProxyError               an impossible use of a model or proxy
    ├── CalibrationError         unusable calibration data, or a step that needs calibration first
    ├── SensitivityError         an impossible request to amp() or fallback()
    ├── TrainingError            a training that cannot start, continue or be resumed, or that has failed
    ├── ExportError              a model that cannot be written as Q/DQ ONNX
    ├── EngineError              an engine that cannot be built, loaded or run
    ├── TaskError                a model, data set or metric of a run that cannot be loaded
    ├── LostRankError            another process of the same torchrun that ended too early
    ├── MissingDependencyError   an optional package that is not installed
    └── UnsupportedVersionError  a package of a version that is not supported

``CalibrationWarning`` is the category of warnings about calibration data.

A message says what is wrong and where, what was expected, and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from itertools import takewhile
from os.path import dirname

__all__ = [
    "DISTRIBUTION",
    "CalibrationError",
    "CalibrationWarning",
    "ConfigError",
    "EngineError",
    "ExportError",
    "LostRankError",
    "MissingDependencyError",
    "ProxyError",
    "QuantizerError",
    "SensitivityError",
    "SourceError",
    "TaskError",
    "TrainingError",
    "UnsupportedVersionError",
    "install_command",
    "is_out_of_memory",
    "require_supported",
]

DISTRIBUTION = "enginequant"
"""Name of this package for pip. On the index, ``quantizer`` is another project with the same import name."""


def install_command(extra: str, *options: str) -> str:
    """Return the shell command that adds an extra to this installation, with options of pip.

    pip reads the extra from the installed package, so the index does not need to have this package.
    """
    return " ".join(["pip install", *options, f"'{DISTRIBUTION}[{extra}]'"])


_PACKAGE = dirname(__file__)


class QuantizerError(Exception):
    """Base class of all errors that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the user's line and the message, without frames of this package.

        IPython defines the name. The complete traceback stays in ``sys.last_value``.
        """
        frames = traceback.extract_tb(self.__traceback__)
        own = list(takewhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)) or frames
        place = [f"line {own[-1].lineno}: {own[-1].line}"] if own and own[-1].line else []
        return [*place, f"{type(self).__name__}: {self}"]


class ConfigError(QuantizerError):
    """One or more problems in a configuration.

    Args:
        problems: one line for each problem.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class SourceError(QuantizerError):
    """Source that cannot be read, parsed or rewritten."""


class ProxyError(QuantizerError):
    """An impossible use of a model or proxy."""


class CalibrationError(QuantizerError):
    """Unusable calibration data, or a step that needs calibration first."""


class CalibrationWarning(UserWarning):
    """Valid but suspicious calibration data, or a suspicious mode of the model."""


class SensitivityError(QuantizerError):
    """An impossible request to ``amp()`` or ``fallback()``."""


class TrainingError(QuantizerError):
    """Training that cannot start, continue or be resumed, or failed."""


class ExportError(QuantizerError):
    """A model that cannot be written as Q/DQ ONNX."""


class EngineError(QuantizerError):
    """An engine that cannot be built, loaded or run."""


class TaskError(QuantizerError):
    """A model, data set or metric of a run that cannot be loaded."""


class LostRankError(QuantizerError):
    """Another process of the same ``torchrun`` that ended before the work was done."""


class MissingDependencyError(QuantizerError):
    """A missing optional package.

    Args:
        package: the module that cannot be imported.
        extra: the extra of this distribution that installs the package.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{package!r} is not installed: run  {install_command(extra)}")


class UnsupportedVersionError(QuantizerError):
    """A package whose installed version is not supported.

    Args:
        package: the name of its distribution.
        found: the installed version.
        supported: the supported versions, such as ``>=5``.
    """

    def __init__(self, package: str, found: str, supported: str) -> None:
        self.package = package
        self.found = found
        self.supported = supported
        super().__init__(
            f"{package} {found} is installed, and {DISTRIBUTION} supports {package}{supported}: "
            f"run  pip install '{package}{supported}'"
        )


def require_supported(package: str) -> None:
    """Check the installed version of a package against the requirements of this one, once per process.

    Nothing is checked if the package is missing, or if this package runs from a source tree without metadata.

    Raises:
        UnsupportedVersionError: the version is not supported.
    """
    with suppress(metadata.PackageNotFoundError):
        _check_version(package)


@cache
def _check_version(package: str) -> None:
    """Check a version; the cache stores no failed checks, because an exception is not cached.

    The check takes 1.5 ms, and a decoder calls it at each token.
    """
    installed, requirements = metadata.version(package), metadata.requires(DISTRIBUTION) or []
    # Parsing takes 1 ms per line, and its import tens of milliseconds.
    lines = [line for line in requirements if line.startswith(package)]
    from packaging.requirements import Requirement

    for requirement in map(Requirement, lines):
        supported = requirement.specifier
        if requirement.name == package and not supported.contains(installed, prereleases=True):
            raise UnsupportedVersionError(package, installed, str(supported))


# On a CPU torch raises a plain RuntimeError, on a GPU a subclass. Both messages contain one of these phrases.
_OUT_OF_MEMORY_PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory: Python's ``MemoryError``, or an error of torch's allocators."""
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in _OUT_OF_MEMORY_PHRASES)
    return isinstance(error, MemoryError)
