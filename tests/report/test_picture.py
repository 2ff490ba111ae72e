"""A picture's file is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.errors import QuantizerError
from quantizer.report.notebook import Picture


def test_a_picture_is_written_as_a_whole(tmp_path: Path) -> None:
    Picture("<svg></svg>").save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "<svg></svg>"
    with pytest.raises(QuantizerError, match="does not exist; make it first"):
        Picture("<svg></svg>").save(tmp_path / "none" / "a.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
