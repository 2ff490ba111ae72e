"""The base of every section of a configuration, and the field types used more than once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from typing import Any
from typing import NoReturn

from pydantic import AfterValidator
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import StringConstraints
from pydantic_core import PydanticCustomError

from quantizer.common.registry import Registry

__all__ = [
    "AxisRange",
    "Expects",
    "OneOf",
    "Section",
    "Text",
    "TextList",
    "reject",
    "some_and_unique",
    "tuple_from_list",
]


class Section(BaseModel):
    """A mapping in the YAML file: frozen, without unknown keys, without conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class Expects:
    """The value that a field wants, in the words of an error message, where its type does not say it.

    Attributes:
        words: completes the sentence "expected ...".
    """

    words: str


@dataclass(frozen=True)
class OneOf:
    """A field whose values are the names in a registry, which may grow; ``check`` is its validator."""

    registry: Registry[Any]

    def check(self, name: str) -> str:
        """Return the name.

        Raises:
            PydanticCustomError: it is not in the registry.
        """
        if name not in self.registry:
            known = ", ".join(map(repr, self.registry))
            raise PydanticCustomError("one_of", "Input should be one of {known}", {"known": known})
        return name


def reject(*problems: tuple[str, str]) -> NoReturn:
    """Raise the error that a validator of a section raises for values that do not fit together.

    Args:
        problems: path of the key relative to the validated value ("latency_batch", "" for the value itself, or
            "/data.head" from the top of the file), and what is wrong.
    """
    summary = "; ".join(f"{path.lstrip('/')}: {text}" if path else text for path, text in problems)
    raise PydanticCustomError("cross_field", "{summary}", {"summary": summary, "problems": list(problems)})


def tuple_from_list(value: Any) -> Any:
    """Return a list as a tuple; anything else as it is, for the type check to judge."""
    return tuple(value) if isinstance(value, list) else value


def _check_range(value: tuple[int, int, int]) -> tuple[int, int, int]:
    low, best, high = value
    if not 1 <= low <= best <= high:
        reject(("", f"got {list(value)}; expected [min, opt, max] with 1 <= min <= opt <= max"))
    return value


def some_and_unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence itself, or an error where it is empty or an entry comes twice."""
    if not value:
        reject(("", "is an empty list; expected at least one entry"))
    twice = sorted({entry for entry in value if value.count(entry) > 1})
    if twice:
        reject(("", f"{twice[0]!r} is listed twice; expected each entry once"))
    return value


Text = Annotated[str, StringConstraints(min_length=1)]
"""A string that is not empty."""

TextList = Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)]
"""A YAML list of strings, kept as a tuple so that a config cannot change."""

AxisRange = Annotated[
    tuple[int, int, int],
    BeforeValidator(tuple_from_list),
    AfterValidator(_check_range),
    Expects("three whole numbers [min, opt, max]"),
]
"""Sizes of a dynamic axis: [min, opt, max]."""
