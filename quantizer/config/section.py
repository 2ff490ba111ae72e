"""The base class of all sections of a configuration, and field types used in several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

from quantizer.common.registry import Registry


class Section(BaseModel):
    """A mapping in the YAML file: frozen, without unknown keys, without conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class Expects:
    """The accepted values of a field, for error messages, if its type does not describe them.

    Attributes:
        words: words that complete the sentence "expected ...".
    """

    words: str


@dataclass(frozen=True)
class OneOf:
    """A field that accepts the names in a registry, also those added later; ``check`` is its validator."""

    registry: Registry[Any]

    def check(self, name: str) -> str:
        """Return the name.

        Raises:
            PydanticCustomError: the name is not in the registry.
        """
        if name not in self.registry:
            known = ", ".join(map(repr, self.registry))
            raise PydanticCustomError("one_of", "Input should be one of {known}", {"known": known})
        return name


def reject(*problems: tuple[str, str]) -> NoReturn:
    """Raise the error of a section's validator for values that contradict each other.

    Args:
        problems: path and text of each problem. Paths are relative to the validated value: "latency_batch", "" for the
            value itself; "/data.head" is a path from the top of the file.
    """
    summary = "; ".join(f"{path.lstrip('/')}: {text}" if path else text for path, text in problems)
    raise PydanticCustomError("cross_field", "{summary}", {"summary": summary, "problems": list(problems)})


def tuple_from_list(value: Any) -> Any:
    """Return a list as a tuple; any other value unchanged, for the type check to reject."""
    return tuple(value) if isinstance(value, list) else value


def _check_range(value: tuple[int, int, int]) -> tuple[int, int, int]:
    low, best, high = value
    if not 1 <= low <= best <= high:
        reject(("", f"got {list(value)}; expected [min, opt, max] with 1 <= min <= opt <= max"))
    return value


def some_and_unique(value: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence itself, or raise if it is empty or has an entry twice."""
    if not value:
        reject(("", "is an empty list; expected at least one entry"))
    twice = sorted({entry for entry in value if value.count(entry) > 1})
    if twice:
        reject(("", f"{twice[0]!r} is listed twice; expected each entry once"))
    return value


Text = Annotated[str, StringConstraints(min_length=1)]
"""A string that is not empty."""

TextList = Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)]
"""A YAML list of strings, as a tuple so that a configuration is immutable."""

AxisRange = Annotated[
    tuple[int, int, int],
    BeforeValidator(tuple_from_list),
    AfterValidator(_check_range),
    Expects("three whole numbers [min, opt, max]"),
]
"""The sizes of a dynamic axis: [min, opt, max]."""
