"""Results that display themselves: as text in a terminal, as tables and charts in a notebook.

``report/notebook.py`` renders them. It is imported when a result is displayed, so that the core does not depend on
reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from quantizer.report.notebook import Picture

_RENDERER = "quantizer.report.notebook"
_ROWS = 40
"""Largest number of rows in ``repr``; ``text()`` returns all."""


class Looks(Protocol):
    """The rendering functions of ``report/notebook.py``."""

    def title(self, shown: Shown) -> str:
        """Return the title of a table, a summary in one line."""

    def text(self, shown: Shown, limit: int | None) -> str:
        """Return a result as plain text, each table with at most ``limit`` rows."""

    def page(self, shown: Shown) -> str:
        """Return a result as HTML."""

    def picture(self, name: str, shown: Shown, **options: Any) -> Picture:
        """Return one chart of a result."""


def looks() -> Looks:
    """Return the module that renders results."""
    return cast(Looks, import_module(_RENDERER))


class Shown:
    """Base of results that display themselves."""

    look: ClassVar[str]
    """Name of the renderer in ``report/notebook.py``."""

    def below(self) -> Sequence[Shown | str]:
        """Return results to display below, and text lines for a terminal only."""
        return ()

    def text(self, limit: int | None = None) -> str:
        """Return the result as plain text with at most ``limit`` rows; None: all rows.

        The text is at most 120 columns wide, less in a narrower terminal if the names fit.
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
