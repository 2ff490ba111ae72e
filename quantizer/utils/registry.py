"""A registry of named entries, with a decorator that adds them and an error that lists the names.

The registries of names in a configuration, usable before the modules that fill them are imported with torch.

``calibrators`` and ``tasks`` export them under their own names, with their types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from quantizer.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named entries: ``@registry.add("name")`` adds a class or function, ``registry["name"]`` returns it."""

    def __init__(self, kind: str, names: Sequence[str] = (), *, reserved: Sequence[str] = ()) -> None:
        self.kind = kind
        self._known = (*names, *reserved)
        self._reserved = reserved
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under ``name``."""

        def decorate(entry: T) -> T:
            if name in self._reserved:
                raise ValueError(f"{self.kind} {name!r}: the name has a meaning of its own")
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ConfigError([f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}"])
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names that a configuration may use, the package's own first."""
        return iter(dict.fromkeys((*self._known, *self._entries)))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._entries)


CALIBRATORS: Registry[Any] = Registry(
    "calibrator", ("percentile", "max", "mse", "entropy"), reserved=("auto", "output")
)
"""``auto`` and ``output`` are no estimates of their own: they compare the others."""

TASKS: Registry[Any] = Registry(
    "task",
    (
        "sentence-similarity",
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
        "audio-classification",
        "automatic-speech-recognition",
        "speech-to-text",
    ),
)
