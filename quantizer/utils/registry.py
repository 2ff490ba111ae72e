"""Registries of named entries, such as calibrators and tasks, which plug-ins extend with a decorator.

``CALIBRATORS`` and ``TASKS`` list the built-in names, so that a configuration can be checked without importing torch
and the modules that define the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Generic, Literal, TypeVar

from quantizer.errors import ConfigError, QuantizerError

T = TypeVar("T")


@contextmanager
def named_in_errors(plug_in: str) -> Iterator[None]:
    """Add the name of a plug-in as a note to exceptions of its code, except for errors of this package."""
    try:
        yield
    except QuantizerError:
        raise
    except Exception as error:
        error.add_note(f"in {plug_in}")
        raise


class Registry(Generic[T]):
    """Named entries: ``@registry.add("name")`` adds a class or function, ``registry["name"]`` returns it.

    Args:
        kind: the word for an entry in messages.
        names: names of built-in entries, which are added when their module is imported.
        reserved: names that entries must not have.
        of: whether entries are classes or objects; None: either.
        has: the attributes that each entry must have.
        call: the names of the positional arguments with which each entry is called; None: not checked.
        returns: what such a call returns, for messages.
    """

    def __init__(
        self,
        kind: str,
        names: Sequence[str] = (),
        *,
        reserved: Sequence[str] = (),
        of: Literal["class", "object"] | None = None,
        has: Sequence[str] = (),
        call: Sequence[str] | None = None,
        returns: str = "",
    ) -> None:
        self.kind = kind
        self._known = (*names, *reserved)
        self._reserved = reserved
        self._of = of
        self._has = has
        self._call = call
        self._returns = returns
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``name``."""

        def decorate(entry: T) -> T:
            if name in self._reserved:
                raise ValueError(f"{self.kind} {name!r}: the name is reserved; choose another one")
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._check(name, entry)
            self._entries[name] = entry
            return entry

        return decorate

    def _check(self, name: str, entry: object) -> None:
        """Raise if an entry lacks what the package needs, so that the error points to the plug-in."""
        is_class = isinstance(entry, type)
        kind = entry.__name__ if isinstance(entry, type) else type(entry).__name__
        description = kind if is_class else f"an object of {kind}"
        if self._of == "class" and not is_class:
            raise ValueError(f"{self.kind} {name!r} is {description}; expected a class: add({name!r})({kind})")
        if self._of == "object" and is_class:
            raise ValueError(f"{self.kind} {name!r} is the class {kind}; expected an object: add({name!r})({kind}())")
        if missing := [attribute for attribute in self._has if not hasattr(entry, attribute)]:
            raise ValueError(f"{self.kind} {name!r} is {description}, which has no {', '.join(missing)}")
        if self._call is not None:
            self._check_call(name, entry, self._call)

    def _check_call(self, name: str, entry: Any, arguments: Sequence[str]) -> None:
        """Raise unless an entry can be called with positional arguments."""
        if not callable(entry):
            raise ValueError(f"{self.kind} {name!r} is an object of {type(entry).__name__}; expected a function")
        parameters = signature(entry)
        try:
            parameters.bind(*arguments)
        except TypeError as error:
            raise ValueError(
                f"{self.kind} {name!r}: {getattr(entry, '__name__', type(entry).__name__)}() has the parameters "
                f"{parameters}; expected ({', '.join(arguments)}), which returns {self._returns}"
            ) from error

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ConfigError([f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}"])
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names that a configuration may use, built-in names first."""
        return iter(dict.fromkeys((*self._known, *self._entries)))

    def names(self) -> list[str]:
        return sorted(self._entries)


CALIBRATORS: Registry[Any] = Registry(
    "calibrator",
    ("percentile", "max", "mse", "entropy"),
    reserved=("auto", "output"),
    of="class",
    has=("observe", "amax", "estimate"),
)
"""``auto`` and ``output`` are reserved because they choose among the other calibrators."""

TASKS: Registry[Any] = Registry(
    "task",
    (
        "sentence-similarity",
        "retrieval",
        "embedding-classification",
        "sequence-classification",
        "token-classification",
        "question-answering",
        "multiple-choice",
        # Before fill-mask: transformers lists BART for both, and it writes text.
        "text-to-text",
        "fill-mask",
        "text-generation",
        "text-generation-with-past",
        "image-classification",
        "zero-shot-image-classification",
        "semantic-segmentation",
        "depth-estimation",
        "object-detection",
        # After zero-shot-image-classification: transformers lists CLIP for both.
        "image-feature-extraction",
        "audio-classification",
        "automatic-speech-recognition",
        "speech-to-text",
    ),
    of="class",
    has=("samples", "targets", "decide", "metric", "paired"),
)

TASKS_OF_RECORDINGS = ("audio-classification", "automatic-speech-recognition", "speech-to-text")
"""Built-in tasks whose ``sequence`` counts the values of a recording, not tokens."""

TASKS_IN_PARTS = ("text-to-text", "speech-to-text")
"""Built-in tasks whose model becomes several graphs."""
