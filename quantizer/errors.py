"""The errors that quantizer raises on purpose.

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

``CalibrationWarning`` is the category of what is doubtful about calibration data, and no error.

A message says what was wrong and where, what was expected, and what to do.
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
"""The name that pip knows this package by; ``quantizer`` on the index is another project, imported by the same name."""


def install_command(extra: str, *options: str) -> str:
    """Return the shell command that adds an extra where this package is installed, with options of pip.

    pip reads the extra of what is installed, from a checkout or a wheel: no index needs to have this package.
    """
    return " ".join(["pip install", *options, f"'{DISTRIBUTION}[{extra}]'"])


_PACKAGE = dirname(__file__)


class QuantizerError(Exception):
    """The base class of all errors that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the user's own line and the message, without our frames.

        The name is IPython's. The message says what to do; the whole traceback is in ``sys.last_value`` as ever.
        """
        frames = traceback.extract_tb(self.__traceback__)
        own = list(takewhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)) or frames
        place = [f"line {own[-1].lineno}: {own[-1].line}"] if own and own[-1].line else []
        return [*place, f"{type(self).__name__}: {self}"]


class ConfigError(QuantizerError):
    """One or more problems in a configuration.

    Args:
        problems: one line per problem; all problems, not only the first.
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
    """Calibration data or a model's mode that is possible, and more often a mistake."""


class SensitivityError(QuantizerError):
    """An impossible request to ``amp()`` or ``fallback()``."""


class TrainingError(QuantizerError):
    """A training that cannot start, continue or be resumed, or that has failed."""


class ExportError(QuantizerError):
    """A model that cannot be written as Q/DQ ONNX."""


class EngineError(QuantizerError):
    """An engine that cannot be built, loaded or run."""


class TaskError(QuantizerError):
    """A model, data set or metric of a run that cannot be loaded."""


class LostRankError(QuantizerError):
    """Another process of the same ``torchrun`` that ended before the work was done."""


class MissingDependencyError(QuantizerError):
    """An optional package that is not installed.

    Args:
        package: the module that could not be imported.
        extra: the extra of this distribution that installs the package.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{package!r} is not installed: run  {install_command(extra)}")


class UnsupportedVersionError(QuantizerError):
    """A package that is installed in a version that this package does not support.

    Args:
        package: the name of its distribution.
        found: the version that is installed.
        supported: the versions that are supported, such as ``>=5``.
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
    """Check the installed version of a package against what the metadata of this one asks for, once a process.

    A source tree that is not installed has no metadata, and then nothing is checked; neither is a missing package.

    Raises:
        UnsupportedVersionError: the version is not among those.
    """
    with suppress(metadata.PackageNotFoundError):
        _check_version(package)


@cache
def _check_version(package: str) -> None:
    """Check a version; one that is refused, and a missing package, are looked up again: what raises is not kept.

    It takes 1.5 ms, and a decoder asks at each token.
    """
    found, asked = metadata.version(package), metadata.requires(DISTRIBUTION) or []
    # Parsing takes a millisecond a line, and its import tens of them.
    lines = [line for line in asked if line.startswith(package)]
    from packaging.requirements import Requirement

    for requirement in map(Requirement, lines):
        supported = requirement.specifier
        if requirement.name == package and not supported.contains(found, prereleases=True):
            raise UnsupportedVersionError(package, found, str(supported))


# On a CPU torch raises a plain RuntimeError; on a GPU a subclass, whose message has these words too.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory: Python's ``MemoryError``, or one of torch's allocators."""
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in _WORDS)
    return isinstance(error, MemoryError)
