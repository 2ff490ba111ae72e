"""Results that show themselves: as text in a terminal, as tables and pictures in a notebook.

How they look is said in ``report/notebook.py``, which is imported when one is shown: what computes knows no report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from quantizer.report.notebook import Picture

_LOOKS = "quantizer.report.notebook"
_ROWS = 40
"""The largest number of samples in ``repr``; ``text()`` returns all."""


class Looks(Protocol):
    """The functions of ``report/notebook.py``."""

    def title(self, shown: Shown) -> str:
        """Return the title of a table, a summary in one line."""

    def text(self, shown: Shown, limit: int | None) -> str:
        """Return a result as plain text, each table with at most ``limit`` rows."""

    def page(self, shown: Shown) -> str:
        """Return a result as HTML."""

    def picture(self, name: str, shown: Shown, **options: Any) -> Picture:
        """Return one picture of a result."""


def looks() -> Looks:
    """Return the module that shows results."""
    return cast(Looks, import_module(_LOOKS))


class Shown:
    """A result that shows itself."""

    look: ClassVar[str]
    """The name of its look in ``report/notebook.py``."""

    def below(self) -> Sequence[Shown | str]:
        """Return the results that are shown below this one, and lines for a terminal alone."""
        return ()

    def text(self, limit: int | None = None) -> str:
        """Return it as plain text with at most ``limit`` rows; None: all rows.

        It is at most 120 columns wide, and as wide as a narrower terminal where that has room for its names.
        """
        return looks().text(self, limit)

    def __repr__(self) -> str:
        return self.text(limit=_ROWS)

    def _repr_html_(self) -> str:
        return looks().page(self)

    def _picture(self, name: str, **options: Any) -> Picture:
        return looks().picture(name, self, **options)


Row = TypeVar("Row")


class Rows(Shown, Generic[Row]):
    """A read-only list of rows with a title."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def title(self) -> str:
        """Return the title of the table, a summary in one line."""
        return looks().title(self)
