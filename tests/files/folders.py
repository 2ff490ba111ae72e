"""Folders of ours for tests, and a process that ends where it is told to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from quantizer.utils.files import MARKER, write_folder
from quantizer.utils.files.temporary import read_marker

KIND = "run"


def fill(text: str) -> Callable[[Path], None]:
    """Two files, one of them below a folder."""

    def write(target: Path) -> None:
        (target / "a").write_text(text)
        (target / "below").mkdir()
        (target / "below" / "b").write_text(text)

    return write


def write(folder: Path, text: str) -> Path:
    """A folder of ours with a text in it."""
    return write_folder(folder, fill(text), kind=KIND)


def text_of(folder: Path) -> str:
    """The text of a folder, which must be whole."""
    assert read_marker(folder) is not None
    assert names(folder) == sorted([MARKER, "a", "below"])
    texts = {(folder / "a").read_text(), (folder / "below" / "b").read_text()}
    assert len(texts) == 1
    return texts.pop()


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


class Steps:
    """Counts the lines that are run in ``quantizer/files`` and does something at one of them.

    Args:
        at: the number of the line.
        then: what is done there.
    """

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        self.done = 0
        self._at = at
        self._then = then

    def __enter__(self) -> Steps:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if "/quantizer/utils/files/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.done += 1
            if self.done == self._at:
                self._then()
        return self._line
