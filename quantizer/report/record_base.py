"""The base of all records of a run."""

from __future__ import annotations

from dataclasses import fields


class Record:
    """The base of a record: lists among the arguments become tuples, so that records compare by value."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))
