"""The package's folders import each other in one direction."""

from __future__ import annotations

from structure import figures


def test_no_rooms_import_each_other() -> None:
    assert not figures().rooms_in_a_cycle
